"""The parts of `python report.py`: reading, judging, drawing."""

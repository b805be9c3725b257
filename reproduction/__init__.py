"""The jobs, tables and claims behind `python reproduce.py`."""

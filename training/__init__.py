"""What train.py leans on: configs, data, checkpoints, processes, the log, estimates."""

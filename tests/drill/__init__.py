"""Attacks on the system, and the record of what came of each. See `__main__.py` for the command."""

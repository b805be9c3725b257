"""Holds small modules that every part of the repository uses."""

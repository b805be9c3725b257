"""Small things that every part of the repository uses."""

"""The notebook: `assignment.py` is what it is made of, and `python -m notebooks` makes it."""

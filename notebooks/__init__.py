"""The notebook: `part_*.py` are what it is made of, and `python -m notebooks` makes it."""

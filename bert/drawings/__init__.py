"""The drawings of `bert/README.md`, made of what the code itself says: see `__main__.py`."""

"""Writing the folder that an instructor hands out; `python -m handout`, see README.md in this folder."""

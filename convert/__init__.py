"""Checkpoints in other programs' formats: `python -m convert MODEL OUT --to gguf`."""

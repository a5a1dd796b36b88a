"""Ratios of speed and memory between this package and others, measured side by side in one run: see README.md here."""

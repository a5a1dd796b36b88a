"""Training on text files: documents as windows, the flags of the programs that do so, and the run in rounds."""

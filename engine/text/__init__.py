"""Training on text files: documents as windows of tokens, flags of the training programs, and a run in rounds."""

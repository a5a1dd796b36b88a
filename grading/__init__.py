"""What the grading scripts share. Nothing here imports a module that a student may replace."""

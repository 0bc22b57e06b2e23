"""The run folder: journal, checkpoints, resume, warm start."""

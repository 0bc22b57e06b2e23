"""Files of a run: run folder, journal, checkpoints, resume and warm start."""

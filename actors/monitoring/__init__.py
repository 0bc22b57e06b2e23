"""What is told of a live run: progress, metrics, timeline, trackers."""

"""Reporting of a live run: progress, metrics, timeline, trackers."""

"""Held-out evaluation: its samples and metrics, and the detection of collapse."""

"""Outputs of a run for its user: live terminal view, trackers, images, summary, HTML report and model card."""

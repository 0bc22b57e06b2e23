"""The small world that the demo trains."""

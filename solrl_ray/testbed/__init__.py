"""The testbed: a small synthetic world of captions and images, which the demo trains on."""

"""Utilities independent of the method: files, deadlines, sending tensors, the user's code, access to Ray."""

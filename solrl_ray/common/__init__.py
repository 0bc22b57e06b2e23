"""Files, deadlines, sending tensors, the user's own code, access to Ray; knows nothing of the method."""

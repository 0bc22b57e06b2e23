"""Ray's vocabulary: calls, waits, names, capacity, termination."""

"""Access to Ray: calls, waits, names, capacity, termination."""

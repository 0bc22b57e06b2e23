"""Sampling of work units, pruning, selection, rank fidelity and its floor."""

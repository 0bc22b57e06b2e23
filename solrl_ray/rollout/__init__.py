"""Sampling a unit, pruning, selection, rank fidelity and its floor."""

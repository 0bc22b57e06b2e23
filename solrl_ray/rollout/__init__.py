"""Sampling a unit, pruning, selection, rank fidelity, audit, fallback."""

"""Dispatch of units to workers, and of their results to the selector."""

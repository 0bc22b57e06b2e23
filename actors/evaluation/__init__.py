"""Evaluations on held-out prompts: their times, policies and requests."""

"""Evaluations on held-out prompts: schedule, evaluated policies, dispatch and results."""

"""Scheduling: assigns units to workers and decides which results count; pure, without clocks or Ray."""

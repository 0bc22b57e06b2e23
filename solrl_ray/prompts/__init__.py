"""Prompts and their reference images: import, reading, choice per iteration, encoding and caching."""

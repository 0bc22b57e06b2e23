"""Prompts: read, imported, chosen, encoded, with their reference pictures."""

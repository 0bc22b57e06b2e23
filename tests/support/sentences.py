"""What a refusal must say: the key at its beginning, and the values that it names. Its other words are free."""

from __future__ import annotations


def names(said: str, key: str, values: str) -> bool:
    """Whether a sentence begins with `key` and has each of the words in `values`, separated by white space."""
    return said.startswith((f"{key} ", f"{key}:")) and all(value in said for value in values.split())

"""Tokens that are sent in a header."""

from __future__ import annotations

from solrl_ray.errors import UserError


def check_token(token: str, variable: str) -> None:
    """Raise UserError if a header cannot hold `token`, which came from an environment variable. It is not shown."""
    if strange := sorted({letter for letter in token if not "!" <= letter <= "~"}):
        raise UserError(
            f"{variable} holds the character {strange[0]!r}, which no token has, such as a typographic quotation mark; "
            "set it to the token alone."
        )

"""Checks tokens that are sent in a header."""

from __future__ import annotations

from solrl_ray.errors import UserError


def check_token(token: str, variable: str) -> None:
    """Raise UserError if a header cannot hold `token`. The message names the environment `variable`, not the token."""
    if invalid := sorted({letter for letter in token if not "!" <= letter <= "~"}):
        raise UserError(
            f"{variable} holds the character {invalid[0]!r}, which no token has (a space or a typographic quotation "
            "mark?); set it to the token alone."
        )

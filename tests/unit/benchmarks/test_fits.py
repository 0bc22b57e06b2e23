"""Which models train on which GPU: the table of the README."""

from __future__ import annotations

from pathlib import Path

import fits

README = Path(__file__).parents[3] / "README.md"


def test_the_readme_has_the_table_that_the_plan_makes() -> None:
    assert "\n".join(fits.table()) in README.read_text()

"""How values are put into sentences."""

from __future__ import annotations

import pytest

from solrl_ray.config.problems import counted


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 steps"),
        (1, "1 step"),
        (1.0, "1 step"),
        (0.5, "0.5 steps"),
        (2, "2 steps"),
        (1_234_567, "1,234,567 steps"),
    ],
)
def test_one_thing_is_singular(count: float, shown: str) -> None:
    assert counted(count, "step") == shown

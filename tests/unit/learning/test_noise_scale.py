"""Signal and noise of a step's gradient, against gradients that are known."""

from __future__ import annotations

import pytest

from solrl_ray.learning.noise_scale import ended_groups


@pytest.mark.parametrize(
    ("sizes", "part", "per_round", "ended"),
    [
        ((4, 4, 4), range(12), 4, [1, 1, 1]),
        ((4, 4, 4), range(12), 2, [0, 1, 0, 1, 0, 1]),
        ((4, 4, 4), range(12), 8, [2, 1]),
        ((4, 4, 4), range(12), 3, [0, 0, 0, 3]),
        ((4, 4, 4, 4), range(8, 16), 4, [1, 1]),  # the second optimiser step of two
        ((4, 3, 3), range(10), 4, [1, 0, 2]),
    ],
)
def test_a_piece_has_the_whole_groups_that_have_ended(
    sizes: tuple[int, ...], part: range, per_round: int, ended: list[int]
) -> None:
    ends = [min(start + per_round, part.stop) for start in range(part.start, part.stop, per_round)]
    assert ended_groups(part, sizes, ends) == ended

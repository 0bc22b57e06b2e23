"""The rules by which the seeds of a pool are chosen (`rollout.selection`): what each keeps, its words and its limits.

A pool is ranked by reward, the highest first; of equal rewards the smaller index comes first. A rule keeps some of the
ranking: ``top`` is the first floor(K / 2) of these seeds and ``bottom`` the last ceil(K / 2), so the K chosen seeds are
distinct whatever the ties. Another rule is a row of `RULES` and a name in `SelectionKind`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

SelectionKind = Literal["best_worst", "best", "random"]
Draw = Callable[[int], Sequence[int]]
"""A permutation of so many positions, by an address."""


@dataclass(frozen=True, slots=True)
class Rule:
    words: str
    """The chosen seeds, for plan and report, with the fields ``keep`` and ``half``."""
    kept: Callable[[list[int], int, Draw], list[int]]
    """Positions as ranked, K and a draw → the positions that it keeps, K or more, as ranked."""
    keeps_ends: bool = False
    """Whether it chooses the highest and the lowest rewards of every pool. Only then the middle of a pool may be
    pruned, and equal rewards of the chosen seeds mean that all of the pool's rewards are equal.
    """


def _drawn(ranked: list[int], keep: int, draw: Draw) -> list[int]:
    chosen = set(draw(len(ranked))[:keep])
    return [position for position in ranked if position in chosen]


RULES: dict[SelectionKind, Rule] = {
    "best_worst": Rule("{half} best and {half} worst", lambda ranked, keep, draw: ranked, keeps_ends=True),
    "best": Rule("the {keep} best", lambda ranked, keep, draw: ranked[:keep]),
    "random": Rule("{keep} by an addressed draw", _drawn),
}


def choose(
    rewards: Sequence[float], keep: int, kind: SelectionKind = "best_worst", draw: Draw = range
) -> tuple[list[int], list[int]]:
    """Positions of top, in falling order of rewards, and of bottom, in rising order.

    Raises:
        ValueError: K is below 2 or above the number of rewards.
    """
    if not 2 <= keep <= len(rewards):
        raise ValueError(f"keep must lie between 2 and the {len(rewards)} rewards, got {keep}")
    ranked = sorted(range(len(rewards)), key=lambda position: (-rewards[position], position))
    kept = RULES[kind].kept(ranked, keep, draw)
    return kept[: keep // 2], kept[::-1][: keep - keep // 2]


def describe(kind: SelectionKind, keep: int, pool: int) -> str:
    """For plan and report: ``8 of 24 seeds per prompt (4 best and 4 worst)``."""
    if keep == pool:
        return f"all {pool} seeds per prompt"
    return f"{keep} of {pool} seeds per prompt ({RULES[kind].words.format(keep=keep, half=keep // 2)})"

"""The selection rules for the seeds of a pool (`rollout.selection`): the kept seeds, the description and the limits of
each rule.

A pool is ranked by reward, the highest first; ties are ordered by index, the smaller first. A rule keeps some of the
ranked seeds: ``top`` is the first floor(K / 2) of the kept seeds and ``bottom`` the last ceil(K / 2), so the K chosen
seeds are distinct even with ties. To add a rule, add a row to `RULES` and a name to `SelectionKind`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

SelectionKind = Literal["best_worst", "best", "random"]
Draw = Callable[[int], Sequence[int]]
"""Returns a seeded permutation of the given number of positions."""


@dataclass(frozen=True, slots=True)
class Rule:
    words: str
    """Description of the chosen seeds for plan and report, a format string with the fields ``keep`` and ``half``."""
    kept: Callable[[list[int], int, Draw], list[int]]
    """Ranked positions, K and a draw → the kept positions, K or more, in the same order."""
    keeps_ends: bool = False
    """Whether the rule chooses the highest and the lowest rewards of every pool. Only such a rule allows pruning the
    middle of a pool. With it, equal rewards of the chosen seeds mean that all rewards of the pool are equal.
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
    """Positions of the top seeds in falling order of rewards, and of the bottom seeds in rising order.

    Raises:
        ValueError: K is below 2 or above the number of rewards.
    """
    if not 2 <= keep <= len(rewards):
        raise ValueError(f"keep must lie between 2 and the {len(rewards)} rewards, got {keep}")
    ranked = sorted(range(len(rewards)), key=lambda position: (-rewards[position], position))
    kept = RULES[kind].kept(ranked, keep, draw)
    return kept[: keep // 2], kept[::-1][: keep - keep // 2]


def describe(kind: SelectionKind, keep: int, pool: int) -> str:
    """The selection in words, for plan and report: ``8 of 24 seeds per prompt (4 best and 4 worst)``."""
    if keep == pool:
        return f"all {pool} seeds per prompt"
    return f"{keep} of {pool} seeds per prompt ({RULES[kind].words.format(keep=keep, half=keep // 2)})"

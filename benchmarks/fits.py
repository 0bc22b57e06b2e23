"""Which model fits which card? Prints the table of the README, which a test holds against the plan.

    python benchmarks/fits.py

A cell has the minutes of an iteration, and whether frozen weights leave the card while it explores (offload); all of it
is estimated. Nothing is measured.
"""

from __future__ import annotations

from solrl_ray.cli.models_on_cards import Verdict, published, verdicts
from solrl_ray.errors import UserError
from solrl_ray.simulator.forecast import moving_weights
from solrl_ray.simulator.price_list import PriceList
from solrl_ray.simulator.prices import Cluster, price_list, priced

CARDS = ("h200", "h100-80", "a100-80", "l40s", "rtx5090", "rtx4090")
"""Columns: what `solrl plan --gpu` takes."""


def seconds(verdict: Verdict, prices: PriceList) -> float | None:
    """Estimated seconds of an iteration: its stages in sequence, and frozen weights that come back. None if no similar
    model was priced.
    """
    arithmetic = verdict.arithmetic
    try:
        stages = priced(arithmetic.config, arithmetic, prices, Cluster(gpu=prices.gpu)).stages
    except UserError:
        return None
    work = arithmetic.explore_units * stages.explore + arithmetic.config.rollout.prompts * stages.regenerate
    return work + stages.update + stages.merge + moving_weights(arithmetic, prices)


def cell(verdict: Verdict, prices: PriceList) -> str:
    if not verdict.fits:
        return "–"
    took = seconds(verdict, prices)
    return ("fits" if took is None else f"{took / 60:.0f} min") + ", offload" * verdict.offloads


def row(model: str, columns: dict[str, dict[str, str]]) -> str:
    return f"| `{model}` | {' | '.join(columns[card][model] for card in CARDS)} |"


def column(card: str) -> dict[str, str]:
    """Model → cell."""
    prices = price_list(card)
    assert prices.card is not None
    return {verdict.model: cell(verdict, prices) for verdict in verdicts(prices.card, prices.fastest)}


def table() -> list[str]:
    columns = {card: column(card) for card in CARDS}
    head = [f"| `--gpu` | {' | '.join(CARDS)} |", "|---" * (len(CARDS) + 1) + "|"]
    return head + [row(model, columns) for model in published()]


if __name__ == "__main__":
    print("\n".join(table()))

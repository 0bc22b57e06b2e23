"""Which model fits which card? Prints the table of the README, which a test holds against the plan.

    python benchmarks/fits.py

A cell has the hours of a whole run without its evaluations, and whether frozen weights leave the card while it explores
(offload); all of it is estimated. Nothing is measured.
"""

from __future__ import annotations

from solrl_ray.cli.models_on_cards import Verdict, published, verdicts
from solrl_ray.errors import UserError
from solrl_ray.plan.forecast import forecast
from solrl_ray.plan.price_list import PriceList
from solrl_ray.plan.prices import Cluster, orchestration, price_list

CARDS = ("h200", "h100-80", "a100-80", "l40s", "rtx5090", "rtx4090")
"""Columns: what `solrl plan --gpu` takes."""


def cell(verdict: Verdict, prices: PriceList) -> str:
    if not verdict.fits:
        return "–"
    try:
        made = forecast(verdict.arithmetic, prices, Cluster(gpu=prices.gpu), orchestration(), advise=False)
        said = f"{made.seconds * verdict.arithmetic.config.run.iterations / 3600:.1f} h"
    except UserError:  # no similar model was priced
        said = "fits"
    return said + ", offload" * verdict.offloads


def source(prices: PriceList) -> str:
    """Where a column's times are from."""
    if not prices.like:
        return "measured steps"
    return "iterations compared" if prices.compared else "from the data sheet"


def table() -> list[str]:
    lists = {card: price_list(card) for card in CARDS}
    columns = {}
    for card, prices in lists.items():
        assert prices.card is not None
        found = {verdict.model: cell(verdict, prices) for verdict in verdicts(prices.card, prices.fastest)}
        columns[card] = [source(prices), *(found[model] for model in published())]
    names = ["hours are", *(f"`{model}`" for model in published())]
    rows = [f"| {' | '.join(cells)} |" for cells in zip(names, *columns.values(), strict=True)]
    return [f"| `--gpu` | {' | '.join(CARDS)} |", "|---" * (len(CARDS) + 1) + "|", *rows]


if __name__ == "__main__":
    print("\n".join(table()))

"""Estimates the price list of an unmeasured card from a measured one, by their data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from solrl_ray.simulator.price_list import CompiledPasses, Figure, ModelCosts, PriceList, Speed

PASSES = ("forward", "backward", "backward_checkpointed")
"""Limited by matrix products, like solver steps."""
MOVES = ("decode_and_reward", "publication", "load", "merge")
"""Limited by memory bandwidth. A checkpoint is limited by neither and costs the same."""

T = TypeVar("T")


def scaled_from(prices: PriceList, measured: PriceList) -> PriceList:
    """`prices` with the models of `measured` that it lacks.

    Figures of matrix products are scaled by the ratio of dense BF16 TFLOP/s, in each tier; those of memory by the ratio
    of bandwidths. ``nvfp4``, which `measured` lacks, is priced as its FP8. All of them are estimates.
    """
    assert prices.speed is not None
    assert measured.speed is not None
    own = {(model.family, model.parameters, model.resolution) for model in prices.models}
    missing = [m for m in measured.models if (m.family, m.parameters, m.resolution) not in own]
    models = [_model(model, prices.speed, measured) for model in missing]
    return prices.model_copy(update={"models": (*prices.models, *models)})


def _model(costs: ModelCosts, speed: Speed, measured: PriceList) -> ModelCosts:
    assert measured.speed is not None
    compute = measured.speed.bf16_tflops / speed.bf16_tflops
    memory = measured.speed.memory_tb_per_second / speed.memory_tb_per_second

    def scaled(figure: Figure, factor: float, ratio: str) -> Figure:
        source = f"{figure.time} on {measured.gpu}, times {factor:.2g}, the ratio of {ratio}"
        return figure.model_copy(update={"ms": figure.ms * factor, "measured": False, "source": source})

    def by_compute(figure: Figure) -> Figure:
        return scaled(figure, compute, "BF16 TFLOP/s")

    figures: dict[str, Any] = {name: by_compute(found) for name in PASSES if (found := getattr(costs, name))}
    figures |= {name: scaled(found, memory, "memory bandwidths") for name in MOVES if (found := getattr(costs, name))}
    figures["checkpoint"] = Figure(ms=costs.checkpoint.ms, measured=False, source=f"as on {measured.gpu}")
    if costs.compiled:
        figures["compiled"] = CompiledPasses(**{name: by_compute(figure) for name, figure in costs.compiled})

    def of_tiers(known: Mapping[str, T]) -> dict[str, T]:
        known = {**known, **({"nvfp4": known["fp8"]} if "fp8" in known else {})}
        return {tier: known[tier] for tier in speed.tiers if tier in known}

    figures["steps"] = {tier: by_compute(step) for tier, step in of_tiers(costs.steps).items()}
    figures["scopes"] = {tier: tuple(map(by_compute, steps)) for tier, steps in of_tiers(costs.scopes).items()}
    return costs.model_copy(update=figures)

"""A card's price list: its memory, its speed, and the cost of each stage of each model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import Field

from solrl_ray.config.resolution import OneShape, as_shape
from solrl_ray.config.schema import Precision
from solrl_ray.config.section import AboveZero, Positive, Section, Share
from solrl_ray.planning.fitting import HOST_LINK, Gpu
from solrl_ray.records import SampleShape

ONCE = ("publication", "load", "merge", "checkpoint")
"""Figures of a revision or checkpoint, once an iteration. Most of it is the host's work, so a card's speed says little:
on an H100 a packed revision took 3.6 s from the update to its proof; by prices of the H200 it is 3.7 s.
"""
BOTH = ("decode_and_reward", "forward", "backward", "backward_checkpointed", "compiled")
"""Figures that matrix products and memory bandwidth limit: decoding, a learner's passes. Products alone limit steps."""
MOVED = 1 / 3
"""Share of them that memory bandwidth limits. An H100 multiplies as fast as an H200 and has 0.7 of its bandwidth. There
updates took 1.08 to 1.19 times as long (``many_gpus.json``, beside prices of the H200); of decoding it is assumed, and
rollouts with it are planned within 7 %.
"""


class Figure(Section):
    ms: AboveZero
    measured: bool
    source: str
    """What was measured, on which version; or how it was estimated."""
    weights: Share | None = None
    """Of a step: share of the transformer's weights that were quantised; null: it is for any share."""

    @property
    def time(self) -> str:
        """In words, with three digits."""
        ms = float(f"{self.ms:.3g}")
        return f"{ms:g} ms" if ms < 1000 else f"{ms / 1000:g} s"

    def scaled(self, factor: float, source: str) -> Figure:
        """An estimate by this one."""
        return self.model_copy(update={"ms": self.ms * factor, "measured": False, "source": source})


class CompiledPasses(Section):
    """A compiled learner's passes, milliseconds of one sample at one timestep."""

    forward: Figure
    """Without gradient."""
    backward: Figure
    """Forward and backward with `learner.activation_memory` 1."""
    half: Figure
    """The same with 0.5."""
    recomputed: Figure
    """The same with 0."""

    def at(self, activation_memory: float) -> Figure:
        """Forward and backward, interpolated linearly between the listed values."""
        listed = {0.0: self.recomputed, 0.5: self.half, 1.0: self.backward}
        if activation_memory in listed:
            return listed[activation_memory]
        ms = float(np.interp(activation_memory, list(listed), [figure.ms for figure in listed.values()]))
        return Figure(ms=ms, measured=False, source="between those of learner.activation_memory 0, 0.5 and 1")


class ModelCosts(Section):
    """Milliseconds of one image or sample; of a revision or checkpoint, once an iteration."""

    family: str
    parameters: AboveZero
    """Parameters of the transformer."""
    resolution: OneShape
    frames: Positive | None = None
    """Of the videos that were measured; None: pictures."""
    steps: dict[str, Figure]
    """Tier → one solver step."""
    scopes: dict[str, tuple[Figure, ...]] = Field(default_factory=dict)
    """Tier → the same with other shares of the weights quantised."""
    decode_and_reward: Figure
    forward: Figure
    """An eager learner's forward without gradient, at one timestep."""
    backward: Figure
    """Forward and backward, at one timestep."""
    backward_checkpointed: Figure | None = None
    """The same with gradient checkpointing; None: one forward more."""
    compiled: CompiledPasses | None = None
    """A compiled learner's passes; None: as an eager one's."""
    publication: Figure
    """Making a revision."""
    load: Figure
    """Verifying, swapping in and proving it on a worker that has received it."""
    merge: Figure | None = None
    """Making, merging, quantising and proving it on a card that also learns; None: by `prices.ON_ITS_CARD`."""
    checkpoint: Figure
    from_data_sheet: bool = False
    """Whether all of it is scaled from another card by data sheets (`scaled_from`), and no iteration was compared."""

    @property
    def shape(self) -> SampleShape:
        """Of the samples that were measured."""
        return replace(as_shape(self.resolution), frames=self.frames or 0)

    def each(self, change: Callable[[str, Figure], Figure]) -> ModelCosts:
        """With every figure changed; `change` is given the name of its field, and the figure."""

        def changed(name: str, value: Any) -> Any:
            if isinstance(value, Figure):
                return change(name, value)
            if isinstance(value, CompiledPasses):
                return CompiledPasses(**{part: change(name, figure) for part, figure in value})
            if isinstance(value, dict):
                return {tier: changed(name, each) for tier, each in value.items()}
            return tuple(changed(name, each) for each in value) if isinstance(value, tuple) else value

        return self.model_copy(update={name: changed(name, value) for name, value in self})


class Speed(Section):
    """Speed of a card, from its data sheet."""

    bf16_tflops: AboveZero
    """Dense matrix products with float32 sums."""
    memory_tb_per_second: AboveZero
    tiers: list[str]
    """Tiers with kernels for it."""


class PriceList(Section):
    gpu: str
    fastest: Precision
    """The tier that ``rollout.explore.precision: auto`` means on this card."""
    memory_gb: AboveZero | None = None
    """As the driver reports it; null: fitting is not checked."""
    host_gb_per_second: AboveZero = HOST_LINK / 1e9
    """Between the card and pinned memory."""
    speed: Speed | None = None
    like: str = ""
    """A shipped list, whose other models are scaled to this card by the speed of both cards."""
    compared: str = ""
    """Whole iterations that were measured on such a card, beside which its plans were held."""
    models: tuple[ModelCosts, ...] = ()

    @property
    def device(self) -> Gpu | None:
        if self.memory_gb is None:
            return None
        return Gpu(name=self.gpu, memory=self.memory_gb * 1e9, host_link=self.host_gb_per_second * 1e9)


def scaled_from(prices: PriceList, measured: PriceList) -> PriceList:
    """`prices` with the models of `measured` that it lacks.

    Steps are scaled by the ratio of dense BF16 TFLOP/s, in each tier; decoding and a learner's passes also by the ratio
    of bandwidths. ``nvfp4``, which `measured` lacks, is priced as its FP8. All of them are estimates.
    """
    assert prices.speed is not None
    assert measured.speed is not None
    speed, reference = prices.speed, measured.speed
    compute = reference.bf16_tflops / speed.bf16_tflops
    memory = reference.memory_tb_per_second / speed.memory_tb_per_second

    def scaled(name: str, figure: Figure) -> Figure:
        if name in ONCE:
            return figure.scaled(1.0, f"as on {measured.gpu}")
        if name not in BOTH:
            factor, ratio = compute, "BF16 TFLOP/s"
        else:
            factor = MOVED * memory + (1 - MOVED) * compute
            ratio = "BF16 TFLOP/s and, for a third of it, of memory bandwidths"
        return figure.scaled(factor, f"{figure.time} on {measured.gpu}, times {factor:.2g}, the ratio of {ratio}")

    def of_tiers(known: dict[str, Any]) -> dict[str, Any]:
        known = {**known, **({"nvfp4": known["fp8"]} if "fp8" in known else {})}
        return {tier: known[tier] for tier in speed.tiers if tier in known}

    own = {(model.family, model.parameters, model.shape) for model in prices.models}
    missing = [m for m in measured.models if (m.family, m.parameters, m.shape) not in own]
    models = []
    for costs in (model.each(scaled) for model in missing):
        tiers = {"steps": of_tiers(costs.steps), "scopes": of_tiers(costs.scopes)}
        models.append(costs.model_copy(update={**tiers, "from_data_sheet": not prices.compared}))
    return prices.model_copy(update={"models": (*prices.models, *models)})

"""The price list of a GPU model: its memory, its speed, and the cost of each stage for each diffusion model."""

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
"""Figures per revision or checkpoint, needed once per iteration. Most of this is work of the host, so GPU speed matters
little: on an H100 a packed revision took 3.6 s from the update to its attestation; the H200's prices predict 3.7 s.
"""
BOTH = ("decode_and_reward", "forward", "backward", "backward_checkpointed", "compiled")
"""Figures limited by matrix products and memory bandwidth: decoding, a learner's passes. Solver steps are limited by
matrix products only.
"""
MOVED = 1 / 3
"""Share of the figures in `BOTH` that is limited by memory bandwidth. An H100 has the same matrix speed as an H200 and
0.7 of its bandwidth. Updates on it took 1.08 to 1.19 times as long as the H200's prices (``many_gpus.json``). For
decoding the share is assumed; rollouts planned with it are within 7 % of measurements.
"""


class Figure(Section):
    ms: AboveZero
    measured: bool
    source: str
    """Measured model, file and version, or the method of the estimate."""
    weights: Share | None = None
    """For a step: share of the transformer's weights that were quantised; null: valid for any share."""

    @property
    def time(self) -> str:
        """The time in words, with three digits."""
        ms = float(f"{self.ms:.3g}")
        return f"{ms:g} ms" if ms < 1000 else f"{ms / 1000:g} s"

    def scaled(self, factor: float, source: str) -> Figure:
        """An estimate: this figure times `factor`."""
        return self.model_copy(update={"ms": self.ms * factor, "measured": False, "source": source})


class CompiledPasses(Section):
    """A compiled learner's passes, milliseconds per sample and timestep."""

    forward: Figure
    """Forward without gradient."""
    backward: Figure
    """Forward and backward with `learner.activation_memory` 1."""
    half: Figure
    """Forward and backward with `learner.activation_memory` 0.5."""
    recomputed: Figure
    """Forward and backward with `learner.activation_memory` 0."""

    def at(self, activation_memory: float) -> Figure:
        """Forward and backward, interpolated linearly between the listed values."""
        listed = {0.0: self.recomputed, 0.5: self.half, 1.0: self.backward}
        if activation_memory in listed:
            return listed[activation_memory]
        ms = float(np.interp(activation_memory, list(listed), [figure.ms for figure in listed.values()]))
        return Figure(ms=ms, measured=False, source="interpolated between learner.activation_memory 0, 0.5 and 1")


class ModelCosts(Section):
    """Costs of one model, milliseconds per image or sample, or per revision or checkpoint."""

    family: str
    parameters: AboveZero
    """Parameters of the transformer."""
    resolution: OneShape
    frames: Positive | None = None
    """Frames of the measured videos; None: images."""
    steps: dict[str, Figure]
    """Tier → one solver step."""
    scopes: dict[str, tuple[Figure, ...]] = Field(default_factory=dict)
    """Tier → one solver step with other shares of the weights quantised."""
    decode_and_reward: Figure
    forward: Figure
    """An eager learner's forward without gradient, at one timestep."""
    backward: Figure
    """An eager learner's forward and backward, at one timestep."""
    backward_checkpointed: Figure | None = None
    """An eager learner's forward and backward with gradient checkpointing; None: estimated as one forward more."""
    compiled: CompiledPasses | None = None
    """A compiled learner's passes; None: as an eager learner's."""
    publication: Figure
    """Building a revision."""
    load: Figure
    """Verifying, loading and attesting a revision on a worker that has received it."""
    merge: Figure | None = None
    """Building, merging, quantising and attesting a revision in a learner's process; None: by `prices.ON_ITS_CARD`."""
    checkpoint: Figure
    from_data_sheet: bool = False
    """Whether all figures are scaled from another GPU by data sheets (`scaled_from`) and not compared with a run."""

    @property
    def shape(self) -> SampleShape:
        """Shape of the measured samples."""
        return replace(as_shape(self.resolution), frames=self.frames or 0)

    def each(self, change: Callable[[str, Figure], Figure]) -> ModelCosts:
        """A copy with every figure replaced by `change` of the figure's field name and the figure."""

        def changed(name: str, value: Any) -> Any:
            if isinstance(value, Figure):
                return change(name, value)
            if isinstance(value, CompiledPasses):
                return CompiledPasses(**{part: change(name, figure) for part, figure in value})
            if isinstance(value, dict):
                return {tier: changed(name, item) for tier, item in value.items()}
            return tuple(changed(name, item) for item in value) if isinstance(value, tuple) else value

        return self.model_copy(update={name: changed(name, value) for name, value in self})


class Speed(Section):
    """Speed of a GPU model, from its data sheet."""

    bf16_tflops: AboveZero
    """Dense matrix products with float32 accumulation."""
    memory_tb_per_second: AboveZero
    tiers: list[str]
    """Precision tiers with kernels for the GPU."""


class PriceList(Section):
    gpu: str
    fastest: Precision
    """Tier of ``rollout.explore.precision: auto`` on this GPU."""
    memory_gb: AboveZero | None = None
    """GPU memory as the driver reports it, GB; null: plans do not check whether a run fits."""
    host_gb_per_second: AboveZero = HOST_LINK / 1e9
    """Bandwidth between the GPU and pinned host memory, GB/s."""
    speed: Speed | None = None
    like: str = ""
    """A shipped list. Its models that this list lacks are scaled to this GPU by the speed of both GPUs."""
    compared: str = ""
    """Measured iterations on this GPU with which plans were compared."""
    models: tuple[ModelCosts, ...] = ()

    @property
    def device(self) -> Gpu | None:
        if self.memory_gb is None:
            return None
        return Gpu(name=self.gpu, memory=self.memory_gb * 1e9, host_link=self.host_gb_per_second * 1e9)


def scaled_from(prices: PriceList, measured: PriceList) -> PriceList:
    """`prices`, extended by the models of `measured` that it lacks.

    Steps in all tiers are scaled by the ratio of dense BF16 TFLOP/s; decoding and a learner's passes also by the ratio
    of memory bandwidths. ``nvfp4``, which `measured` does not have, gets the price of FP8. All added figures are
    estimates.
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
            ratio = "BF16 TFLOP/s, and for a third of it of memory bandwidths"
        return figure.scaled(factor, f"{figure.time} on {measured.gpu}, times {factor:.2g}, the ratio of {ratio}")

    def of_tiers(known: dict[str, Any]) -> dict[str, Any]:
        known = {**known, **({"nvfp4": known["fp8"]} if "fp8" in known else {})}
        return {tier: known[tier] for tier in speed.tiers if tier in known}

    listed = {(model.family, model.parameters, model.shape) for model in prices.models}
    missing = [m for m in measured.models if (m.family, m.parameters, m.shape) not in listed]
    models = []
    for costs in (model.each(scaled) for model in missing):
        tiers = {"steps": of_tiers(costs.steps), "scopes": of_tiers(costs.scopes)}
        models.append(costs.model_copy(update={**tiers, "from_data_sheet": not prices.compared}))
    return prices.model_copy(update={"models": (*prices.models, *models)})

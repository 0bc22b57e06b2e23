"""Fitting a run into GPU memory: the share of activations that the learner keeps, whether weights are offloaded, and
the settings that a plan proposes if the run does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from solrl_ray.config import compiled_learner
from solrl_ray.config.pools import encodes_on_cards
from solrl_ray.config.problems import listed
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import cannot_offload
from solrl_ray.errors import UserError
from solrl_ray.planning.arithmetic import Arithmetic, ModelFacts, describe, describe_size
from solrl_ray.planning.gpu_memory import ENCODE, GpuMemory, gpu_memories

MAX_FILL = 0.95
"""Share of GPU memory that a run may use. The margin covers errors of the estimates."""
WARN_FILL = 0.97
"""Share of the usable memory above which frozen weights are offloaded: estimates were up to 4 % too low."""
ACTIVATION_FILL = 0.85
"""Share of GPU memory that a run with kept activations may use if `learner.activation_memory` is null: estimates of
activations are up to a quarter off.
"""
MIN_STREAM_FLOPS = 6.5e11
"""Floating-point operations of a stream's forward below which launching its kernels on the CPU takes longer than
computing them (`solrl_ray.planning.prices.LAUNCH_MS`).
"""
HOST_LINK = 25e9
"""Default bandwidth between a GPU and pinned host memory, bytes per second: PCIe 4.0, 16 lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The memory of a GPU model."""

    name: str
    memory: float
    """Bytes, as the driver reports them."""
    host_link: float = HOST_LINK
    """Bandwidth between the GPU and pinned host memory, bytes per second."""

    @property
    def usable(self) -> float:
        return MAX_FILL * self.memory


def is_open(config: Config) -> bool:
    """Whether the GPU memory decides a setting: the share of activations that the learner keeps, or offloading."""
    return compiled_learner.is_open(config) or _may_offload(config)


def with_activation_memory(config: Config, facts: ModelFacts, card: Gpu) -> Config:
    """The configuration with `learner.activation_memory: null` resolved for the GPU: the first combination of `_passes`
    that fits, which may have a smaller `learner.micro_batch`. 0 if the model's memory is unknown.
    """
    if not compiled_learner.is_open(config):
        return config
    if not facts.memory_is_known:
        return compiled_learner.keeping(config, 0.0)
    for share, micro_batch in _passes(config.learner.micro_batch, facts):
        kept = compiled_learner.keeping(config, share, micro_batch)
        if min(map(peak, _variants(describe(kept, facts)))) <= ACTIVATION_FILL * card.memory:
            return kept
    return compiled_learner.keeping(config, 0.0)


def resolve_auto(config: Config, facts: ModelFacts, card: Gpu) -> Config:
    """The configuration with `learner.activation_memory: null` and `fleet.offload: null` resolved for the GPU.

    `fleet.offload` changes no result; `learner.activation_memory` can change the kernels and therefore the bits.

    Raises `UserError` like `check`. Memory is only estimated, so the message also tells how to skip this check.
    """
    config = with_activation_memory(config, facts, card)
    if not _may_offload(config):
        return config
    try:
        return check(describe(config, facts), card).config
    except UserError as error:
        raise UserError(f"{str(error).removesuffix('.')}, or --set fleet.offload=false to try it anyway.") from error


def fitted(arithmetic: Arithmetic, card: Gpu) -> Arithmetic | None:
    """The run with `fleet.offload` resolved for the GPU: false, unless the peak is then too close to the usable memory.
    None if the run does not fit.
    """
    fitting = [variant for variant in _variants(arithmetic) if peak(variant) <= card.usable]
    with_margin = (variant for variant in fitting if peak(variant) <= WARN_FILL * card.usable)
    return next(with_margin, min(fitting, key=peak, default=None))


def check(arithmetic: Arithmetic, card: Gpu) -> Arithmetic:
    """`fitted`, for a run that must fit. Raises `UserError` with settings that make the run fit, if there are any."""
    if run := fitted(arithmetic, card):
        return run
    needs = (
        f"{listed(gpu_memories(arithmetic)[0].roles)} on one {card.name} need {_least(arithmetic)} (estimated), but "
        f"only {describe_size(card.usable)} of its {describe_size(card.memory)} are usable"
    )
    if changes := fitting_changes(arithmetic, card):
        least = least_peak(_changed(arithmetic, changes))
        raise UserError(f"{needs}; it fits with {settings(changes)} ({describe_size(least)}).")
    smallest = min(_variants(_changed(arithmetic, dict(_candidates(arithmetic)))), key=peak)
    problem = f"{needs}; with micro-batches of 1 and learner.activation_memory 0 it is still {_least(smallest)}"
    full = [process for process in gpu_memories(smallest)[0].processes if process.peak > card.usable]
    if any(process.fullest == ENCODE for process in full):
        elsewhere = "set fleet.encoders.num_gpus=0 to encode on CPUs"
        if encodes_on_cards(arithmetic.config.fleet):
            elsewhere = "with fleet.placement split, fleet.encoders encode on CPUs or on separate GPUs"
        raise UserError(f"{problem}: use a GPU with more memory, or move the text encoders elsewhere: {elsewhere}.")
    alone = "" if full else ", or one GPU per worker (num_gpus: 1)"
    frames = arithmetic.config.model.frames
    shorter = f", fewer frames (model.frames is {frames})" if frames else ""
    raise UserError(
        f"{problem}: use a GPU with more memory{shorter} or a smaller model{alone}; a table in the README shows which "
        "models train on which GPU."
    )


def fitting_changes(arithmetic: Arithmetic, card: Gpu) -> dict[str, Any] | None:
    """Keys and values with which the run fits: the shortest sufficient prefix of `_candidates`. None if even all of
    them are not enough.
    """
    changes: dict[str, Any] = {}
    for key, value in _candidates(arithmetic):
        changes[key] = value
        if fitted(_changed(arithmetic, changes), card):
            return changes
    return None


def _candidates(arithmetic: Arithmetic) -> Iterator[tuple[str, Any]]:
    """Changes to try, the cheapest first: offloading, recomputing activations, then smaller micro-batches of the
    learner, of decoding and of sampling.
    """
    config = arithmetic.config
    if config.fleet.offload is False and not cannot_offload(config):
        yield "fleet.offload", True
    kept = compiled_learner.activation_memory(config)
    for share in (0.5, 0):
        if share < kept and (share == 0 or compiled_learner.is_compiled(config)):
            yield "learner.activation_memory", share
    decoded = config.model.decoding.micro_batch or config.rollout.regenerate.micro_batch
    for key, size in (("learner.micro_batch", config.learner.micro_batch), ("model.decoding.micro_batch", decoded)):
        yield from ((key, smaller) for smaller in _halves(size))
    for stage in ("explore", "regenerate"):
        key = f"rollout.{stage}.micro_batch"
        yield from ((key, size) for size in _halves(config.value_of(key)) if config.rollout.pool % size == 0)


def _passes(largest: int, facts: ModelFacts) -> Iterator[tuple[float, int]]:
    """Kept shares of activations and learner micro-batches to try, the fastest first. A smaller micro-batch costs no
    time while it keeps a GPU busy; below that it costs more time than recomputing activations.
    """
    sizes = [largest, *_halves(largest)]
    busy = [size for size in sizes if size * facts.stream_flops >= MIN_STREAM_FLOPS] or sizes[:1]
    for group in (busy, sizes[len(busy) :]):
        yield from product((1.0, 0.5, 0.0), group)


def _halves(size: int) -> Iterator[int]:
    while size > 1:
        size //= 2
        yield size


def _may_offload(config: Config) -> bool:
    return config.fleet.offload is None and not cannot_offload(config)


def _variants(arithmetic: Arithmetic) -> list[Arithmetic]:
    """The run without and with offloading if `fleet.offload` is open, else only the given run."""
    if not _may_offload(arithmetic.config):
        return [arithmetic]
    return [_changed(arithmetic, {"fleet.offload": offload}) for offload in (False, True)]


def peak(arithmetic: Arithmetic) -> int:
    """Estimated peak memory of the fullest GPU, bytes; 0 without GPUs."""
    return max((gpu.peak for gpu in gpu_memories(arithmetic)), default=0)


def least_peak(arithmetic: Arithmetic) -> int:
    """`peak`, with offloading if that is open and needs less."""
    return min(map(peak, _variants(arithmetic)))


def settings(changes: Mapping[str, Any]) -> str:
    """``--set fleet.offload=true --set learner.micro_batch=2``."""
    return " ".join(f"--set {key}={str(value).lower()}" for key, value in changes.items())


def _least(arithmetic: Arithmetic) -> str:
    """The smallest peak in words: ``47 GB to explore``, ``42 GB to load with fleet.offload``."""
    least = min(_variants(arithmetic), key=peak)
    fullest = gpu_memories(least)[0]
    stages = listed(list(dict.fromkeys(process.fullest for process in fullest.processes)))
    return f"{describe_size(fullest.peak)} to {stages}{' with fleet.offload' * bool(least.config.fleet.offload)}"


def _changed(arithmetic: Arithmetic, changes: Mapping[str, Any]) -> Arithmetic:
    numbers = {"train_prompts": arithmetic.train_prompts, "heldout_prompts": arithmetic.heldout_prompts}
    return describe(arithmetic.config.changed(changes), arithmetic.facts, **numbers)


# Rows of the printed plan


def rows(arithmetic: Arithmetic, card: Gpu | None = None) -> list[tuple[str, str]]:
    """Names and sentences: what is on the fullest card, its stages, what offloading brings; none without GPUs."""
    if arithmetic.gpus and not arithmetic.facts.memory_is_known:
        return [("memory", f"unknown: nobody has measured models of family {arithmetic.config.model.family!r}")]
    found = gpu_memories(arithmetic)
    if not found:
        return []
    held = "; ".join(
        f"{listed(process.roles)} {describe_size(process.held)} ({_sizes(process.holds)})"
        for process in found[0].processes
    )
    shown = [
        ("GPU memory", f"what the processes of one GPU always hold, estimated: {held}"),
        ("GPU peak", f"the most that one GPU holds, estimated: {_stages(found[0])}"),
    ]
    if not cannot_offload(arithmetic.config):
        offloading = _changed(arithmetic, {"fleet.offload": True})
        away, link = gpu_memories(offloading)[0], card.host_link if card else HOST_LINK
        said = (
            f"with fleet.offload one GPU holds at most {_stages(away)}: {describe_size(away.offloaded)} of frozen "
            "weights leave it while it explores; they take as much pinned main memory for each GPU, and about "
            f"{seconds(offloading, link):.2g} s an iteration at {link / 1e9:g} GB/s; all prompts of an iteration are "
            "explored, then they are regenerated"
        )
        shown.append(("offload", said))
    return [*shown, ("store", _store(arithmetic))]


def sentence(arithmetic: Arithmetic, card: Gpu) -> str:
    """That the run fits such cards, and how; empty without GPUs. Raises `UserError` as `check` if it does not."""
    if not gpu_memories(arithmetic):
        return ""
    made = check(arithmetic, card)
    offload = ""
    if made.config != arithmetic.config:
        offload = "; fleet.offload null becomes false: all weights stay on the GPU"
        if made.config.fleet.offload:
            offload = "; fleet.offload null becomes true: frozen weights leave the GPU while it explores"
    needs, usable, memory = map(describe_size, (peak(made), card.usable, card.memory))
    return f"peak {needs} of the {memory} of {card.name}, of which {usable} ({MAX_FILL:.0%}) is usable{offload}"


def seconds(arithmetic: Arithmetic, link: float = HOST_LINK) -> float:
    """Seconds per iteration to copy offloaded weights back to a GPU, with a bandwidth of `link` bytes per second."""
    return max((gpu.offloaded for gpu in gpu_memories(arithmetic)), default=0) / link


def _sizes(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {describe_size(size)}" for name, size in parts.items() if size)


def _stages(card: GpuMemory) -> str:
    told = []
    for process in card.processes:
        stages = _sizes({name: process.at(name) for name in process.stages})
        told.append(f"{listed(process.roles)}: {stages}" if len(card.processes) > 1 else stages)
    return f"{describe_size(card.peak)} ({'; '.join(told)})"


def _store(arithmetic: Arithmetic) -> str:
    config, holds = arithmetic.config, ["samples", "two revisions"]
    store = arithmetic.latents_bytes + 2 * arithmetic.revision_bytes
    if config.model.frames:  # for images it is small
        shown = config.evaluation.pictures * config.evaluation.samples
        store += 3 * shown * config.model.shapes.largest.volume  # a byte a colour
        holds.append(f"{shown} videos of an evaluation")
    return f"{describe_size(store)} in Ray's object store (/dev/shm: {', '.join(holds)})"

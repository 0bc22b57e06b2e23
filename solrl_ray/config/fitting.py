"""Whether a run fits a card: what the card decides, what is changed if it does not, and how a plan says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from solrl_ray.config import compiled_learner
from solrl_ray.config.arithmetic import Arithmetic, ModelFacts, describe, size_in_words
from solrl_ray.config.card_memory import ENCODE, CardMemory, cards
from solrl_ray.config.contradictions import value_of
from solrl_ray.config.pools import encodes_on_cards
from solrl_ray.config.problems import listed
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import cannot_offload
from solrl_ray.errors import UserError

FILLED = 0.95
"""Share of a card that a plan fills: the rest is for what the estimates miss."""
CLOSE = 0.97
"""Share of what may be filled from which frozen weights leave the card: estimates were up to 4 % too low."""
ROOMY = 0.85
"""Share of a card up to which activations are kept if that is left open: their estimate is up to a quarter off."""
BUSY = 1e12
"""Floating-point operations of a block's forward below which the CPU that launches its kernels is taken for the slower
one. An estimate from SANA's updates on an H200: a pass took about as long with 2 samples as with 4."""
HOST_LINK = 25e9
"""Bytes a second between a card and pinned memory where nobody measured them: PCIe 4.0, 16 lanes."""


class TooSmall(UserError):
    """No setting that is tried makes the run fit the card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU, as far as memory goes."""

    name: str
    memory: float
    """Bytes, as its driver reports them."""
    host_link: float = HOST_LINK
    """Bytes a second between it and pinned memory."""

    @property
    def usable(self) -> float:
        return FILLED * self.memory


def is_open(config: Config) -> bool:
    """Whether something is left to the card: which activations the learner keeps, or whether weights leave it."""
    return compiled_learner.is_open(config) or _may_offload(config)


def _may_offload(config: Config) -> bool:
    return config.fleet.offload is None and not cannot_offload(config)


def with_activation_memory(config: Config, facts: ModelFacts, card: Card) -> Config:
    """The configuration with what `learner.activation_memory: null` means on such cards: the first of `_passes` that
    leaves room on them, which may have a smaller `learner.micro_batch`.
    """
    if not compiled_learner.is_open(config):
        return config
    roomy = replace(card, memory=card.memory * ROOMY / FILLED)
    tried = (compiled_learner.keeping(config, *each) for each in _passes(config.learner.micro_batch, facts))
    kept = (each for each in tried if fitted(describe(each, facts), roomy))
    return next(kept, compiled_learner.keeping(config, 0.0))


def _passes(largest: int, facts: ModelFacts) -> Iterator[tuple[float, int]]:
    """Shares of the activations that are kept and micro-batches of the learner, from what costs least time. A smaller
    micro-batch costs nothing while it keeps a GPU busy, and then more than computing activations again.
    """
    sizes = [largest, *_halves(largest)]
    busy = [size for size in sizes if size * facts.block_flops >= BUSY] or sizes[:1]
    for some in (busy, sizes[len(busy) :]):
        yield from product((1.0, 0.5, 0.0), some)


def settled(config: Config, facts: ModelFacts, card: Card) -> Config:
    """The configuration with what `learner.activation_memory: null` and `fleet.offload: null` mean on such cards.

    The second changes no result; the first may choose other kernels, and so other bits.

    Raises `UserError` as `check`. What is needed is estimated, so it also says how to start without this check.
    """
    config = with_activation_memory(config, facts, card)
    if not _may_offload(config):
        return config
    try:
        return check(describe(config, facts), card).config
    except UserError as error:
        raise UserError(f"{str(error).removesuffix('.')}, or --set fleet.offload=false to try it anyway.") from error


def fitted(arithmetic: Arithmetic, card: Card) -> Arithmetic | None:
    """The run with what `fleet.offload` means on such cards: false unless the peak is then close to what may be filled.
    None if the run does not fit them.
    """
    ways = [each for each in _ways(arithmetic) if _peak(each) <= card.usable]
    roomy = (each for each in ways if _peak(each) <= CLOSE * card.usable)
    return next(roomy, min(ways, key=_peak, default=None))


def _ways(arithmetic: Arithmetic) -> list[Arithmetic]:
    """Without and with offloading, where that is open."""
    if not _may_offload(arithmetic.config):
        return [arithmetic]
    return [_changed(arithmetic, {"fleet.offload": offload}) for offload in (False, True)]


def _peak(arithmetic: Arithmetic) -> int:
    return max((card.peak for card in cards(arithmetic)), default=0)


def check(arithmetic: Arithmetic, card: Card) -> Arithmetic:
    """`fitted`. Raises `UserError` with what would make the run fit, `TooSmall` if nothing would."""
    found = fitted(arithmetic, card)
    if found is not None:
        return found
    least = min(_ways(arithmetic), key=_peak)
    so = "estimated, with fleet.offload" if least.config.fleet.offload else "estimated"
    fullest = cards(least)[0]
    said = (
        f"{listed(fullest.roles)} on one {card.name} need {_stage(fullest)} ({so}), and {size_in_words(card.usable)} "
        f"of its {size_in_words(card.memory)} may be filled"
    )
    changes = fitting_changes(arithmetic, card)
    if changes:
        words = " ".join(f"--set {key}={str(value).lower()}" for key, value in changes.items())
        peak = min(_peak(each) for each in _ways(_changed(arithmetic, changes)))
        raise UserError(f"{said}; it fits with {words} ({size_in_words(peak)}).")
    candidates = dict(_candidates(arithmetic))
    smallest = min(_ways(_changed(arithmetic, candidates)), key=_peak)
    tried = ["micro-batches of 1", "learner.activation_memory 0"]
    tried += ["fleet.offload true"] * ("fleet.offload" in candidates)
    fullest = cards(smallest)[0]
    said += f"; with {listed(tried)} it is still {_stage(fullest)}"
    if any(process.fullest == ENCODE and process.peak > card.usable for process in fullest.processes):
        elsewhere = "fleet.encoders.num_gpus 0 encodes on CPUs"
        if encodes_on_cards(arithmetic.config.fleet):
            elsewhere = "with fleet.placement split, fleet.encoders encode on CPUs or on GPUs of their own"
        raise TooSmall(f"{said}: take a card with more memory, or leave the text encoders out of it: {elsewhere}.")
    if any(process.peak > card.usable for process in fullest.processes):
        raise TooSmall(f"{said}: take a card with more memory or a smaller model.")
    raise TooSmall(f"{said}: take a card with more memory, a smaller model, or a card for each worker (num_gpus: 1).")


def _stage(card: CardMemory) -> str:
    """``47 GB to explore``."""
    stages = listed(list(dict.fromkeys(process.fullest for process in card.processes)))
    return f"{size_in_words(card.peak)} to {stages}"


def fitting_changes(arithmetic: Arithmetic, card: Card) -> dict[str, Any] | None:
    """Keys and values with which the run fits: the first of `_candidates` that are enough, each as little changed as
    the others allow. None if all of them are not enough."""
    candidates = list(_candidates(arithmetic))
    changes: dict[str, Any] = {}
    for key, value in candidates:
        changes[key] = value
        if _fits(arithmetic, changes, card):
            break
    else:
        return None
    for key in list(changes):
        others = {other: value for other, value in changes.items() if other != key}
        less = [others, *(others | {key: value} for name, value in candidates if name == key)]
        changes = next(fewer for fewer in less if _fits(arithmetic, fewer, card))
    return changes


def _candidates(arithmetic: Arithmetic) -> Iterator[tuple[str, Any]]:
    """What is tried, from what costs least: offloading, computing activations again, then smaller
    batches: of the learner, of decoding, of sampling.
    """
    config = arithmetic.config
    if config.fleet.offload is False and not cannot_offload(config):
        yield "fleet.offload", True
    kept = compiled_learner.activation_memory(config)
    for share in (0.5, 0):
        if share < kept and (share == 0 or compiled_learner.is_compiled(config)):
            yield "learner.activation_memory", share
    yield from (("learner.micro_batch", size) for size in _halves(config.learner.micro_batch))
    sampled = config.rollout.regenerate.micro_batch
    decoded = config.model.decoding.micro_batch or sampled
    yield from (("model.decoding.micro_batch", size) for size in _halves(decoded))
    for stage in ("explore", "regenerate"):
        key = f"rollout.{stage}.micro_batch"
        sizes = _halves(value_of(config, key))
        yield from ((key, size) for size in sizes if config.rollout.pool % size == 0)


def _halves(size: int) -> Iterator[int]:
    while size > 1:
        size //= 2
        yield size


def _fits(arithmetic: Arithmetic, changes: Mapping[str, Any], card: Card) -> bool:
    return fitted(_changed(arithmetic, changes), card) is not None


def _changed(arithmetic: Arithmetic, changes: Mapping[str, Any]) -> Arithmetic:
    config = arithmetic.config
    for key, value in changes.items():
        config = _with(config, key.split("."), value)
    numbers = {"train_prompts": arithmetic.train_prompts, "heldout_prompts": arithmetic.heldout_prompts}
    return describe(config, arithmetic.facts, **numbers)


def _with(section: Any, key: list[str], value: Any) -> Any:
    first, *rest = key
    return section.model_copy(update={first: _with(getattr(section, first), rest, value) if rest else value})


# What a plan prints


def rows(arithmetic: Arithmetic, card: Card | None = None) -> list[tuple[str, str]]:
    """Names and sentences: what is on the fullest card, its stages, what offloading brings; none without GPUs."""
    found = cards(arithmetic)
    if not found:
        return []
    held = "; ".join(
        f"{listed(process.roles)} {size_in_words(process.held)} ({_sizes(process.holds)})"
        for process in found[0].processes
    )
    shown = [
        ("GPU memory", f"what the processes of one GPU always hold, estimated: {held}"),
        ("GPU peak", f"the most that one GPU holds, estimated: {_stages(found[0])}"),
    ]
    if not cannot_offload(arithmetic.config):
        offloading = cards(_changed(arithmetic, {"fleet.offload": True}))[0]
        shown.append(("offload", _offloading(offloading, card.host_link if card else HOST_LINK)))
    return [*shown, ("store", _store(arithmetic))]


def sentence(arithmetic: Arithmetic, card: Card) -> str:
    """That the run fits such cards, and how; empty without GPUs. Raises `UserError` as `check` if it does not."""
    if not cards(arithmetic):
        return ""
    made = check(arithmetic, card)
    offload = (
        "" if made.config == arithmetic.config else f"fleet.offload null is {str(made.config.fleet.offload).lower()}: "
    )
    peak, usable = size_in_words(_peak(made)), size_in_words(card.usable)
    return f"{offload}{peak} of {usable}, which are {FILLED:.0%} of {card.name}"


def _sizes(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size_in_words(size)}" for name, size in parts.items() if size)


def _stages(card: CardMemory) -> str:
    told = []
    for process in card.processes:
        stages = ", ".join(f"{name} {size_in_words(process.at(name))}" for name in process.stages)
        whose = f"{listed(process.roles)}: " if len(card.processes) > 1 else ""
        told.append(f"{whose}{stages}")
    return f"{size_in_words(card.peak)} ({'; '.join(told)})"


def _offloading(card: CardMemory, link: float) -> str:
    return (
        f"with fleet.offload one GPU holds at most {_stages(card)}: {size_in_words(card.offloaded)} of frozen weights "
        f"leave it while it explores; they take as much pinned main memory for each GPU, and about "
        f"{card.offloaded / link:.2g} s an iteration at {link / 1e9:g} GB/s; all prompts of an iteration are explored, "
        "then they are regenerated"
    )


def _store(arithmetic: Arithmetic) -> str:
    store = (arithmetic.latents_bytes or 0) + 2 * (arithmetic.revision_bytes or 0)
    return f"{size_in_words(store)} in Ray's object store (/dev/shm: samples, two revisions)"


def seconds(arithmetic: Arithmetic, link: float = HOST_LINK) -> float:
    """Of an iteration, for frozen weights that come back to a card."""
    return max((card.offloaded for card in cards(arithmetic)), default=0) / link

"""Whether a run fits a card: how its workers share it, what is changed if it does not, and how a plan says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from solrl_ray.config import compiled_learner
from solrl_ray.config.arithmetic import Arithmetic, ModelFacts, describe, size_in_words
from solrl_ray.config.card_memory import SHARINGS, CardMemory, Sharing, cards
from solrl_ray.config.contradictions import value_of
from solrl_ray.config.pools import takes_turns
from solrl_ray.config.problems import listed
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import can_be_packed
from solrl_ray.errors import UserError

FILLED = 0.95
"""Share of a card that a plan fills: the rest is for what the estimates miss."""
CLOSE = 0.97
"""Share of what may be filled from which a plan names the way to share that takes less: estimates were up to 4 % too
low."""
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
    """Whether something is left to the card: what resting workers do with their weights, or which activations the
    learner keeps.
    """
    return compiled_learner.is_open(config) or (config.fleet.sharing == "auto" and takes_turns(config.fleet))


def with_activation_memory(config: Config, facts: ModelFacts, card: Card) -> Config:
    """The configuration with what `learner.activation_memory: null` means on such cards: the first of `_passes` that
    leaves room on them, which may have a smaller `learner.micro_batch`. Laying weights down costs seconds an iteration,
    recomputing costs some of each sample: so `fleet.sharing: auto` makes room for activations.
    """
    if not compiled_learner.is_open(config):
        return config
    roomy = replace(card, memory=card.memory * ROOMY / FILLED)
    tried = (compiled_learner.keeping(config, *each) for each in _passes(config.learner.micro_batch, facts))
    kept = (each for each in tried if sharing_on(describe(each, facts), roomy) is not None)
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
    """The configuration with what `learner.activation_memory: null` and `fleet.sharing: auto` mean on such cards.

    The second changes no result; the first may choose other kernels, and so other bits.

    Raises `UserError` as `check`. What is needed is estimated, so it also says how to start without this check.
    """
    config = with_activation_memory(config, facts, card)
    if not is_open(config):
        return config
    try:
        way = check(describe(config, facts), card)
    except UserError as error:
        raise UserError(f"{str(error).removesuffix('.')}, or --set fleet.sharing=keep to try it anyway.") from error
    return config.model_copy(update={"fleet": config.fleet.model_copy(update={"sharing": way})})


def sharing_on(arithmetic: Arithmetic, card: Card) -> Sharing | None:
    """What `fleet.sharing` means on such cards; None if the run does not fit them so."""
    ways = _ways(arithmetic.config)
    found = cards(arithmetic)
    return next((way for way in ways if all(one.peak(way) <= card.usable for one in found)), None)


def check(arithmetic: Arithmetic, card: Card) -> Sharing:
    """`sharing_on`. Raises `UserError` with what would make the run fit, `TooSmall` if nothing would."""
    found = sharing_on(arithmetic, card)
    if found is not None:
        return found
    way = _ways(arithmetic.config)[-1]
    fullest, turn, peak = _fullest(arithmetic, way)
    said = (
        f"{_names(fullest)} on one {card.name} need {size_in_words(peak)} to {turn} (estimated, with "
        f"fleet.sharing {way}), and {size_in_words(card.usable)} of its {size_in_words(card.memory)} may be filled"
    )
    changes = fitting_changes(arithmetic, card)
    if changes:
        words = " ".join(f"--set {key}={value}" for key, value in changes.items())
        changed = _changed(arithmetic, changes)
        way = sharing_on(changed, card) or way
        peak = max(one.peak(way) for one in cards(changed))
        raise UserError(f"{said}; it fits with {words} ({size_in_words(peak)}).")
    smallest = _changed(arithmetic, dict(_candidates(arithmetic)))
    least = _ways(smallest.config)[-1]
    tried = ["micro-batches of 1", "learner.activation_memory 0"]
    tried += ["publish.base pack"] * (smallest.config.publish.base == "pack")
    tried += [f"fleet.sharing {least}"] * (least != way)
    _, turn, peak = _fullest(smallest, least)
    said += f"; with {listed(tried)} it is still {size_in_words(peak)} to {turn}"
    largest = max((worker for one in cards(smallest) for worker in one.occupants), key=lambda worker: worker.alone)
    if largest.alone > card.usable:
        alone = f"{size_in_words(largest.alone)} for a {largest.role} alone"
        raise TooSmall(f"{said}, and {alone}: take a card with more memory or a smaller model.")
    raise TooSmall(f"{said}: take a card with more memory, a smaller model, or a card for each worker (num_gpus: 1).")


def _fullest(arithmetic: Arithmetic, way: Sharing) -> tuple[CardMemory, str, int]:
    """The fullest card, the turn of its peak, and its bytes then."""
    card = max(cards(arithmetic), key=lambda one: one.peak(way))
    turns = card.turns(way)
    turn = max(turns, key=lambda name: turns[name])
    return card, turn, turns[turn]


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
    """What is tried, from what costs least: laying down, in two turns and in three, a base pack, which takes main
    memory and a longer start, computing activations again, then smaller batches: of the learner, of decoding, of
    sampling.
    """
    config, facts = arithmetic.config, arithmetic.facts
    if config.fleet.sharing != "auto" and takes_turns(config.fleet) and not config.compile.cudagraphs:
        yield from (("fleet.sharing", way) for way in SHARINGS[SHARINGS.index(config.fleet.sharing) + 1 :])
    if config.publish.base != "pack" and facts and facts.quantized_parameters and can_be_packed(config):
        yield "publish.base", "pack"
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
    return sharing_on(_changed(arithmetic, changes), card) is not None


def _changed(arithmetic: Arithmetic, changes: Mapping[str, Any]) -> Arithmetic:
    config = arithmetic.config
    for key, value in changes.items():
        config = _with(config, key.split("."), value)
    return describe(config, arithmetic.facts)


def _with(section: Any, key: list[str], value: Any) -> Any:
    first, *rest = key
    return section.model_copy(update={first: _with(getattr(section, first), rest, value) if rest else value})


def _ways(config: Config) -> tuple[Sharing, ...]:
    sharing = config.fleet.sharing
    if sharing != "auto":
        return (sharing,)
    lays_down = takes_turns(config.fleet) and not config.compile.cudagraphs  # graphs read at fixed addresses
    return SHARINGS if lays_down else ("keep",)


def _names(card: CardMemory) -> str:
    return listed([worker.role for worker in card.occupants])


# What a plan prints


def rows(arithmetic: Arithmetic, card: Card | None = None) -> list[tuple[str, str]]:
    """Names and sentences: what is on the fullest card, its turns, and what laying down costs; none without GPUs."""
    found = cards(arithmetic)
    if not found:
        return []
    shown = [("GPU memory", _resting(found[0])), ("GPU peak", _turns(found[0]))]
    return shown + ([("lay_down", _laying_down(arithmetic, found[0], card))] if found[0].takes_turns else [])


def sentence(arithmetic: Arithmetic, card: Card) -> str:
    """That the run fits such cards, and how; empty without GPUs. Raises `UserError` as `check` if it does not."""
    found = cards(arithmetic)
    if not found:
        return ""
    way, asked = check(arithmetic, card), arithmetic.config.fleet.sharing
    peak = max(one.peak(way) for one in found)
    fits = f"{size_in_words(peak)} of {size_in_words(card.usable)}, which are {FILLED:.0%} of {card.name}"
    if not found[0].takes_turns:
        return fits
    safer = "" if arithmetic.config.compile.cudagraphs else _safer(found, way, card)  # graphs allow keep alone
    return f"fleet.sharing {asked}{f' is {way}' if asked != way else ''}: {fits}{safer}"


def _safer(found: tuple[CardMemory, ...], way: Sharing, card: Card) -> str:
    """What to set if the peak is close to what may be filled; empty if it is not, or nothing takes less."""
    peaks = {other: max(one.peak(other) for one in found) for other in SHARINGS}
    least = min(SHARINGS, key=peaks.__getitem__)
    if peaks[way] <= CLOSE * card.usable or peaks[least] >= peaks[way]:
        return ""
    return f"; close to the limit: --set fleet.sharing={least} takes {size_in_words(peaks[least])}, and more time"


def _resting(card: CardMemory) -> str:
    workers = []
    for worker in card.occupants:
        held = {**worker.weights, **worker.stays}
        parts = ", ".join(f"{name} {size_in_words(size)}" for name, size in held.items() if size)
        workers.append(f"{worker.role} {size_in_words(worker.laid_down + worker.staying)} ({parts})")
    return f"what workers hold on one GPU between their turns, estimated: {'; '.join(workers)}"


def _turns(card: CardMemory) -> str:
    def told(sharing: Sharing) -> str:
        turns = card.turns(sharing)
        most = max(turns.values())
        return (
            f"{sharing} {size_in_words(most)} (" + ", ".join(f"{n} {size_in_words(s)}" for n, s in turns.items()) + ")"
        )

    most = "the most that one GPU holds in a turn, estimated"
    if not card.takes_turns:
        return f"{most}: {told('keep').removeprefix('keep ')}"
    return f"{most}, by fleet.sharing: {'; '.join(told(way) for way in SHARINGS)}"


def _laying_down(arithmetic: Arithmetic, card: CardMemory, on: Card | None) -> str:
    link = on.host_link if on else HOST_LINK
    store = (arithmetic.latents_bytes or 0) + 2 * (arithmetic.revision_bytes or 0)
    held = "samples, two revisions"
    if arithmetic.config.publish.base == "pack" and arithmetic.facts is not None:
        store += arithmetic.facts.explorer_bytes
        held += f", the base pack of {size_in_words(arithmetic.facts.explorer_bytes)} that explorers start from"
    prompts = arithmetic.config.rollout.prompts
    return (
        f"this fleet.sharing takes {size_in_words(card.host)} of pinned host memory for the first GPU of a machine and "
        f"at most as much for each other, beside {size_in_words(store)} in Ray's object store (/dev/shm: {held}); "
        f"about {seconds(card, link):.2g} s an iteration: {size_in_words(card.laid_down)}, which all workers of a GPU "
        f"together lay down, go down and up once at {link / 1e9:g} GB/s · one_at_a_time moves the same bytes: all "
        f"{prompts} prompts of an iteration are explored, then they are regenerated"
    )


def seconds(card: CardMemory, link: float = HOST_LINK) -> float:
    """Of an iteration, for what all workers of a card lay down: each byte goes down and up once."""
    return 2 * card.laid_down / link

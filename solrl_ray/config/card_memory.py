"""What the workers of a run hold of a GPU's memory: at rest, in each turn, and if they lay their weights down.

    keep            a turn's peak = what all hold at rest + what the turn takes besides
    lay_down        a turn's peak = what those at work hold and take + what stays of those who rest
    one_at_a_time   the same; explorers and regenerators are never at work together

Everything is estimated from sizes, by the rules below; `tests/unit/config/test_card_memory.py` holds it against peaks
that were measured. Not counted: NCCL between cards, memory that CUDA graphs keep, rewards of one's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from solrl_ray.config.arithmetic import DTYPE_BYTES, Arithmetic, ModelFacts
from solrl_ray.config.pools import pools, takes_turns
from solrl_ray.config.reward_kinds import kind_of
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import UNQUANTIZED_TIERS, is_one_stage, pool_sampling
from solrl_ray.config.update import FLOAT32_BYTES

Sharing = Literal["keep", "lay_down", "one_at_a_time"]
SHARINGS: tuple[Sharing, ...] = ("keep", "lay_down", "one_at_a_time")
"""From what costs least time to what takes least memory."""
CONTEXT = 740_000_000
"""Bytes of a process' CUDA context with the kernels it has loaded: what an explorer on an H100 held beside PyTorch's
allocator."""
LEARNER_EXTRA = 500_000_000
"""Bytes that a resting learner rank was measured to hold besides, on an H100: probably of NCCL and DeepSpeed."""
RESERVED = 1.1
"""What PyTorch's allocator takes of the card for each byte that a turn holds at its peak. Chosen by the measured
peaks."""
LOAD, EXPLORE, REGENERATE, LEARN, PUBLISH, EVALUATE = "load", "explore", "regenerate", "learn", "publish", "evaluate"
ROLL_OUT = "explore and regenerate"
SCORING = ("decoder", "rewards")


@dataclass(frozen=True, slots=True)
class Turn:
    """A time in which some are at work."""

    does: tuple[str, ...]
    """Keys of `Occupant.takes`."""
    at_work: tuple[str, ...]
    """Roles whose weights must be on the card."""
    beside: tuple[str, ...] = ()
    """What may go on at the same time."""


_SAMPLERS = ("explorer", "regenerator")
_OWN = {LEARN: Turn((LEARN,), ("learner rank",)), EVALUATE: Turn((EVALUATE,), ("regenerator",))}
_TOGETHER = {
    LOAD: Turn((LOAD,), _SAMPLERS, beside=(REGENERATE,)),  # as when an explorer has died
    ROLL_OUT: Turn((EXPLORE, REGENERATE), _SAMPLERS),  # a prompt is regenerated while others are explored
    PUBLISH: Turn((PUBLISH,), _SAMPLERS),
    **_OWN,
}
_STAGES = {
    LOAD: Turn((LOAD,), ("explorer",)),
    EXPLORE: Turn((EXPLORE,), ("explorer",)),
    REGENERATE: Turn((REGENERATE,), ("regenerator",)),
    PUBLISH: Turn((PUBLISH,), ("explorer",)),
    **_OWN,
}
TURNS: Mapping[Sharing, Mapping[str, Turn]] = {"keep": _TOGETHER, "lay_down": _TOGETHER, "one_at_a_time": _STAGES}
"""By name; each worker's weights come up once in an iteration, whichever of these it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupant:
    """One worker on a card; all in bytes."""

    role: str
    weights: Mapping[str, int]
    """What it can lay down, by what it is."""
    stays: Mapping[str, int]
    """What it cannot."""
    takes: Mapping[str, int] = field(default_factory=dict)
    """What it does → what that takes besides, as PyTorch's allocator rounds it up. To load: weights in full precision,
    before they are quantised."""

    @property
    def laid_down(self) -> int:
        return sum(self.weights.values())

    @property
    def staying(self) -> int:
        return sum(self.stays.values())

    @property
    def alone(self) -> int:
        """Its peak on a card of its own, where it does one thing at a time."""
        return self.laid_down + self.staying + max(self.takes.values(), default=0)

    def taken(self, *work: str) -> int:
        return sum(self.takes.get(each, 0) for each in work)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardMemory:
    """Who is together on a GPU."""

    occupants: tuple[Occupant, ...]
    takes_turns: bool
    """Whether they take turns, so that they could lay their weights down."""

    def turn(self, name: str, sharing: Sharing) -> int:
        """Bytes at a turn's peak."""
        turn = TURNS[sharing][name]
        there = [worker for worker in self.occupants if sharing == "keep" or worker.role in turn.at_work]
        held = sum(worker.laid_down + worker.taken(*turn.does, *turn.beside) for worker in there)
        return held + sum(worker.staying for worker in self.occupants)

    def turns(self, sharing: Sharing) -> dict[str, int]:
        """Those in which somebody here is at work."""
        turns = TURNS[sharing].items()
        names = [name for name, turn in turns if any(worker.taken(*turn.does) for worker in self.occupants)]
        return {name: self.turn(name, sharing) for name in names}

    def peak(self, sharing: Sharing) -> int:
        return max(self.turns(sharing).values())

    @property
    def laid_down(self) -> int:
        """Bytes that go down and up."""
        return sum(worker.laid_down for worker in self.occupants)

    @property
    def host(self) -> int:
        """Bytes of pinned host memory that hold them: what a regenerator has as well is there once
        (`models.host_memory`), which is a learner's whole base and what scores an explorer's previews.
        """
        by_role = {worker.role: worker.weights for worker in self.occupants}
        if "regenerator" not in by_role:
            return self.laid_down
        explorer, learner = by_role.get("explorer", {}), by_role.get("learner rank", {})
        return self.laid_down - sum(explorer.get(name, 0) for name in SCORING) - sum(learner.values())


def cards(arithmetic: Arithmetic) -> tuple[CardMemory, ...]:
    """The kinds of cards that a run has, each once, the fullest first; none if nobody has a GPU.

    Workers are put on cards in turn, one of each kind at a time, wherever their `num_gpus` still fits.
    """
    config = arithmetic.config
    if arithmetic.facts is None:
        return ()
    filled: list[tuple[float, list[str]]] = []
    for role, share in _in_turn(config):
        place = next((i for i, (used, _) in enumerate(filled) if used + share <= 1 + 1e-6), len(filled))
        if place == len(filled):
            filled.append((0.0, []))
        filled[place] = (filled[place][0] + share, [*filled[place][1], role])
    made = _occupants(arithmetic, arithmetic.facts)
    kinds = dict.fromkeys(tuple(sorted(roles, key=list(made).index)) for _, roles in filled)
    turns = takes_turns(config.fleet)
    found = [CardMemory(occupants=tuple(made[r] for r in roles), takes_turns=turns) for roles in kinds]
    return tuple(sorted(found, key=lambda card: -card.peak("keep")))


def _in_turn(config: Config) -> list[tuple[str, float]]:
    """Workers with GPUs: role, share of a card."""
    queues = [
        [("regenerator" if name == "regenerators" else "explorer", min(1.0, pool.num_gpus))] * pool.count
        for name, pool in pools(config.fleet).items()
    ]
    queues.append([("learner rank", min(1.0, config.fleet.learners.num_gpus))] * config.learner.world_size)
    queues = [queue for queue in queues if queue[0][1] > 0]
    longest = max(map(len, queues), default=0)
    return [queue[place] for place in range(longest) for queue in queues if place < len(queue)]


def _occupants(arithmetic: Arithmetic, facts: ModelFacts) -> dict[str, Occupant]:
    config, width = arithmetic.config, DTYPE_BYTES[arithmetic.config.model.dtype]
    pool, rollout = pool_sampling(config), config.rollout
    context = {"CUDA context": CONTEXT}
    sizes = facts.decoder_parameters * width, sum(kind_of(reward).gpu_bytes for reward in config.rewards)
    scoring = dict(zip(SCORING, sizes, strict=True))
    quantised = pool.tier not in UNQUANTIZED_TIERS
    staged = arithmetic.packed_bytes or 0
    explorer = Occupant(
        role="explorer",
        weights={
            "transformer": facts.explorer_bytes,
            "base of what LoRA touches": _kept_base(config, facts, width),
            **scoring,
        },
        stays=context,
        takes={
            LOAD: facts.quantized_parameters * width * (quantised and config.publish.base == "checkpoint"),
            EXPLORE: _sampling(config, facts, pool.micro_batch),
            PUBLISH: round(RESERVED * staged),
        },
    )
    regenerating = 0 if is_one_stage(config) else _sampling(config, facts, rollout.regenerate.micro_batch)
    evaluating = _sampling(config, facts, config.evaluation.samples)
    regenerator = Occupant(
        role="regenerator",
        weights={
            "transformer": arithmetic.weights_bytes or 0,
            "base of what LoRA touches": facts.touched_parameters * width,
            **scoring,
        },
        stays=context,
        takes={REGENERATE: max(regenerating, evaluating), EVALUATE: evaluating},
    )
    learner = Occupant(
        role="learner rank",
        weights={"transformer": arithmetic.weights_bytes or 0},
        stays={
            **context,
            "other": LEARNER_EXTRA,
            "LoRA policies, gradient and AdamW state": arithmetic.training_bytes or 0,
        },
        takes={LEARN: round(RESERVED * (arithmetic.activation_bytes or 0))},
    )
    return {worker.role: worker for worker in (explorer, regenerator, learner)}


def _kept_base(config: Config, facts: ModelFacts, width: int) -> int:
    """What an explorer merges revisions into: of layers that it does not quantise; with `publish.mode` lora, of all."""
    quantised = (facts.touched_parameters - facts.plain_touched_parameters) * (config.publish.mode == "lora")
    return facts.plain_touched_parameters * width + quantised * DTYPE_BYTES["bfloat16"]


def _sampling(config: Config, facts: ModelFacts, micro_batch: int) -> int:
    """A micro-batch's forward, and its decoding, whose memory PyTorch keeps beside it."""
    at_once = min(config.model.decoding.micro_batch or micro_batch, micro_batch)
    images = 2 * 3 * config.model.resolution**2 * FLOAT32_BYTES  # each, and once more as they are put together
    held = micro_batch * (facts.forward_bytes + images) + at_once * facts.decoding_bytes
    return round(RESERVED * held)

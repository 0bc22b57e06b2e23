"""What the processes of a run hold of a GPU's memory, stage by stage.

::

    colocated  load ─► encode ─► explore ─► regenerate ─► learn ─► publish    one process, one BF16 base
    split      one process a role, each at its own fullest stage, and all that share a card at the same time

Everything is estimated from sizes, by the rules below. `tests/unit/planning/test_gpu_memory.py` compares processes with
one role with peaks that were measured. Processes with several roles are estimates until they are measured.
Not counted: NCCL between cards, rewards of one's own, and what vision-language rewards hold beside their weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

from solrl_ray.config.pools import REGENERATORS, apart, encodes_on_cards, is_colocated, on_cards
from solrl_ray.config.reward_kinds import kind_of
from solrl_ray.config.schema import Config, Model
from solrl_ray.config.strategies import is_one_stage, pool_sampling
from solrl_ray.models.shapes import DTYPE_BYTES
from solrl_ray.planning.arithmetic import Arithmetic, ModelFacts
from solrl_ray.planning.update import FLOAT32_BYTES, trains_guided_velocity

CONTEXT = 740_000_000
"""Bytes of a CUDA context with loaded kernels: what an explorer on an H100 held beside PyTorch's allocator."""
LEARNER_EXTRA = 500_000_000
"""Bytes that a resting learner rank was measured to hold besides, on an H100: probably of NCCL and DeepSpeed."""
RESERVED = 1.1
"""What PyTorch's allocator takes of the card for each byte that a stage holds at its peak; from measured peaks."""
EXPLORER, REGENERATOR, LEARNER, ENCODER = "explorer", "regenerator", "learner rank", "text encoder"
LOAD, ENCODE, EXPLORE, REGENERATE = "load", "encode", "explore", "regenerate"
LEARN, PUBLISH, EVALUATE = "learn", "publish", "evaluate"

Parts = Mapping[str, int]
"""What it is → its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """One process on a card, which does one stage at a time."""

    roles: tuple[str, ...]
    holds: Parts
    """All the time."""
    stages: Mapping[str, Parts]
    """Stage → what is on the card besides, as PyTorch's allocator rounds it up; below 0: what has left it."""

    @property
    def held(self) -> int:
        return sum(self.holds.values())

    def at(self, stage: str) -> int:
        """Bytes at a stage's peak."""
        return self.held + sum(self.stages[stage].values())

    @property
    def fullest(self) -> str:
        return max(self.stages, key=self.at)

    @property
    def peak(self) -> int:
        return self.at(self.fullest)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    processes: tuple[ProcessMemory, ...]
    offloaded: int = 0
    """Bytes that leave it while it explores, with `fleet.offload`; pinned main memory keeps a copy."""

    @property
    def peak(self) -> int:
        """Several processes may all be at their fullest stages at once."""
        return sum(process.peak for process in self.processes)

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for process in self.processes for role in process.roles)


def gpu_memories(arithmetic: Arithmetic) -> tuple[GpuMemory, ...]:
    """The kinds of cards that a run has, each once, the fullest first; none if nobody has a GPU, or if the memory
    of the model is unknown.

    Processes are put on cards one of each kind at a time, wherever their `num_gpus` still fits. An open `fleet.offload`
    counts as false.
    """
    config = arithmetic.config
    placed = _placed(config) if arithmetic.facts.memory_is_known else ()
    kinds = dict.fromkeys(tuple(sorted(processes)) for processes in placed)
    found = [
        GpuMemory(
            processes=tuple(_process(arithmetic, roles) for roles in kind),
            offloaded=max(_offloaded(arithmetic, roles) for roles in kind),
        )
        for kind in kinds
    ]
    return tuple(sorted(found, key=lambda card: -card.peak))


def gpus(config: Config) -> int:
    """GPUs of the whole fleet; an explorer, regenerator or learner rank without one counts as one, for forecasts."""
    pools = [
        (config.learner.world_size, config.fleet.learners),
        *((pool.count, pool) for pool in apart(config).values()),
    ]
    beyond_one = sum(count * (max(1, math.ceil(worker.num_gpus)) - 1) for count, worker in pools)
    return len(_placed(config)) + beyond_one + sum(count for count, worker in pools if not worker.num_gpus)


def _placed(config: Config) -> list[list[tuple[str, ...]]]:
    """The roles of the processes on each card."""
    return _first_fit(tuple(_in_turn(config)))


@lru_cache(maxsize=4)
def _first_fit(processes: tuple[tuple[tuple[str, ...], float], ...]) -> list[list[tuple[str, ...]]]:
    placed: list[list[tuple[str, ...]]] = []
    filled = defaultdict[float, list[int]](list)
    """Used share → heap of the GPUs with it: there may be thousands of GPUs, but few such shares."""
    for roles, share in processes:
        fits = [(heap[0], used) for used, heap in filled.items() if heap and used + share <= 1 + 1e-6]
        gpu, used = min(fits, default=(len(placed), 0.0))
        if gpu == len(placed):
            placed.append([])
        else:
            heappop(filled[used])
        placed[gpu].append(roles)
        heappush(filled[used + share], gpu)
    return placed


def _in_turn(config: Config) -> list[tuple[tuple[str, ...], float]]:
    """Processes with GPUs: roles, share of a card."""
    shared = {EXPLORER: on_cards(config, "explorers"), REGENERATOR: on_cards(config, REGENERATORS)}
    ranks = [
        (*(role for role, count in shared.items() if rank < count), LEARNER)
        for rank in range(config.learner.world_size)
    ]
    queues = [[(roles, config.fleet.learners.num_gpus) for roles in ranks]] + [
        [((REGENERATOR if name == REGENERATORS else EXPLORER,), pool.num_gpus)] * pool.count
        for name, pool in apart(config).items()
    ]
    if not encodes_on_cards(config.fleet):
        queues.append([((ENCODER,), config.fleet.encoders.num_gpus)] * config.fleet.encoders.count)
    longest = max(map(len, queues))
    processes = [queue[place] for place in range(longest) for queue in queues if place < len(queue)]
    return [(roles, min(1.0, gpus)) for roles, gpus in processes if gpus > 0]


def _process(arithmetic: Arithmetic, roles: tuple[str, ...]) -> ProcessMemory:
    config, facts, width = arithmetic.config, arithmetic.facts, DTYPE_BYTES[arithmetic.config.model.dtype]
    encode = {ENCODE: {"text encoders": facts.text_parameters * width}}
    if config.model.references:  # their encoding is taken to need as much as a picture's decoding
        encode[ENCODE]["autoencoder"] = facts.decoder_parameters * width + facts.decoding_bytes
    if roles == (ENCODER,):
        return ProcessMemory(roles=roles, holds={"CUDA context": CONTEXT}, stages=encode)
    samples, alone = roles != (LEARNER,), roles == (EXPLORER,)
    copied = facts.touched_parameters * width
    if alone:  # what it merges revisions into: layers that it does not quantise; with `publish.mode` lora, all
        quantised = (facts.touched_parameters - facts.plain_touched_parameters) * (config.publish.mode == "lora")
        copied = facts.plain_touched_parameters * width + quantised * DTYPE_BYTES["bfloat16"]
    holds = {
        "transformer": facts.explorer_bytes if alone else arithmetic.weights_bytes,
        "copy of what LoRA touches": copied * samples,
        "explorer's unquantised layers with LoRA": facts.plain_touched_parameters * width * _shares(roles),
        "decoder": facts.decoder_parameters * width * samples,
        "rewards": sum(kind_of(reward).gpu_bytes for reward in config.rewards) * samples,
        "CUDA context": CONTEXT,
    }
    stages: dict[str, Parts] = {LOAD: {}}
    if EXPLORER in roles:
        stages |= _exploring(arithmetic, roles)
    if REGENERATOR in roles:
        stages |= _regenerating(arithmetic, roles)
    if LEARNER in roles and encodes_on_cards(config.fleet):
        stages |= {ENCODE: encode[ENCODE] | {"frozen weights that left": -_offloaded(arithmetic, roles)}}
    if LEARNER in roles:
        holds |= {"other": LEARNER_EXTRA, "LoRA policies, gradient and AdamW state": arithmetic.training_bytes}
        stages[LEARN] = _learning(arithmetic)
        if is_colocated(config.fleet) and arithmetic.packed_bytes:
            stages[PUBLISH] = {"packed weights": round(RESERVED * arithmetic.packed_bytes)}
    return ProcessMemory(roles=roles, holds={name: size for name, size in holds.items() if size}, stages=stages)


def _shares(roles: tuple[str, ...]) -> bool:
    """Whether an explorer shares the model with other roles of its process."""
    return EXPLORER in roles and len(roles) > 1


def _exploring(arithmetic: Arithmetic, roles: tuple[str, ...]) -> dict[str, Parts]:
    config, pool = arithmetic.config, pool_sampling(arithmetic.config)
    explore = {"a micro-batch": _sampling(config.model, arithmetic.facts, pool.micro_batch)}
    if _shares(roles):
        copy = {"quantised copy": _quantized_copy(arithmetic)}
        left = {"frozen weights that left": -_offloaded(arithmetic, roles)}  # each as soon as its copy is made
        return {EXPLORE: copy | left | explore}
    return {EXPLORE: explore, PUBLISH: {"packed weights": round(RESERVED * arithmetic.packed_bytes)}}


def _regenerating(arithmetic: Arithmetic, roles: tuple[str, ...]) -> dict[str, Parts]:
    """Without offloading the quantised copy stays: a prompt is regenerated while others are explored."""
    config, facts = arithmetic.config, arithmetic.facts
    copy = {"quantised copy": _quantized_copy(arithmetic) * (_shares(roles) and not config.fleet.offload)}
    at_once = config.evaluation.prompts_at_once * config.evaluation.samples
    evaluate = {"a micro-batch": _sampling(config.evaluated_model, facts, at_once)}
    regenerate = {"a micro-batch": _sampling(config.model, facts, config.rollout.regenerate.micro_batch)}
    stages: dict[str, Parts] = {} if is_one_stage(config) else {REGENERATE: copy | regenerate}
    return stages | {EVALUATE: copy | evaluate}


def _learning(arithmetic: Arithmetic) -> dict[str, int]:
    """RESERVED × micro-batch × (a + f): `a` a sample's activations, which its backward pass needs, and `f` a forward
    without gradient, that of the negative prompt while they wait; f = 0 unless learners train guided velocities. Other
    passes without gradient come before there are activations.
    """
    config = arithmetic.config
    parts = {"activations": round(RESERVED * arithmetic.activation_bytes)}
    if trains_guided_velocity(config):
        forward = config.learner.micro_batch * arithmetic.facts.forward_bytes
        parts["forward of the negative prompt"] = round(RESERVED * forward)
    return parts


def _quantized_copy(arithmetic: Arithmetic) -> int:
    """What an explorer has beside the layers that it shares with the base."""
    facts, width = arithmetic.facts, DTYPE_BYTES[arithmetic.config.model.dtype]
    return facts.explorer_bytes - (facts.parameters + facts.buffers - facts.quantized_parameters) * width


def _offloaded(arithmetic: Arithmetic, roles: tuple[str, ...]) -> int:
    """The frozen weights of quantised layers; LoRA touches the others."""
    config, facts = arithmetic.config, arithmetic.facts
    if not config.fleet.offload or not _shares(roles):
        return 0
    touched = facts.touched_parameters - facts.plain_touched_parameters
    return (facts.quantized_parameters - touched) * DTYPE_BYTES[config.model.dtype]


def _sampling(model: Model, facts: ModelFacts, micro_batch: int) -> int:
    """A micro-batch's forward, of twice its size with `cfg`, and its decoding, whose memory PyTorch keeps beside it."""
    at_once = min(model.decoding.micro_batch or micro_batch, micro_batch)
    images = 2 * 3 * model.shapes.largest.volume * FLOAT32_BYTES  # each, and once more as they are put together
    forward = facts.forward_bytes * model.cfg.velocities
    held = micro_batch * (forward + images) + at_once * facts.decoding_bytes
    return round(RESERVED * held)

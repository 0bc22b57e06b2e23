"""Estimates of the GPU memory of a run's processes, stage by stage.

::

    colocated  load ─► encode ─► explore ─► regenerate ─► learn ─► publish    one process, one BF16 base
    split      one process per role; the sum of the peaks of all processes on a GPU

Everything is estimated from sizes, by the rules below. `tests/unit/planning/test_gpu_memory.py` compares processes with
one role with measured peaks. Processes with several roles have not been measured.
Not counted: NCCL between GPUs, custom rewards, and memory of vision-language rewards besides their weights.
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
"""Bytes of a CUDA context with loaded kernels: memory of an explorer on an H100 outside PyTorch's allocator."""
LEARNER_EXTRA = 500_000_000
"""Additional bytes of an idle learner rank, measured on an H100: probably NCCL and DeepSpeed."""
RESERVED = 1.1
"""Bytes that PyTorch's allocator reserves per byte of a stage's peak; from measured peaks."""
EXPLORER, REGENERATOR, LEARNER, ENCODER = "explorer", "regenerator", "learner rank", "text encoder"
LOAD, ENCODE, EXPLORE, REGENERATE = "load", "encode", "explore", "regenerate"
LEARN, PUBLISH, EVALUATE = "learn", "publish", "evaluate"

Parts = Mapping[str, int]
"""Name → bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """One process on a GPU, which runs one stage at a time."""

    roles: tuple[str, ...]
    holds: Parts
    """Memory held all the time."""
    stages: Mapping[str, Parts]
    """Stage → additional memory during the stage, with the overhead of PyTorch's allocator; negative: offloaded."""

    @property
    def held(self) -> int:
        return sum(self.holds.values())

    def at(self, stage: str) -> int:
        """Peak memory of a stage, bytes."""
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
    """Bytes offloaded to pinned host memory during exploration, with `fleet.offload`."""

    @property
    def peak(self) -> int:
        """Peak memory, bytes: the sum over its processes, which can all be at their fullest stages at once."""
        return sum(process.peak for process in self.processes)

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for process in self.processes for role in process.roles)


def gpu_memories(arithmetic: Arithmetic) -> tuple[GpuMemory, ...]:
    """The distinct GPUs of a run by their processes, each once, the fullest first; empty if no process has a GPU or the
    memory of the model is unknown.

    Processes are assigned in turn, one of each kind, to the first GPU with enough free `num_gpus`. An open
    `fleet.offload` counts as false.
    """
    config = arithmetic.config
    placed = _placed(config) if arithmetic.facts.memory_is_known else ()
    kinds = dict.fromkeys(tuple(sorted(processes)) for processes in placed)
    memories = [
        GpuMemory(
            processes=tuple(_process(arithmetic, roles) for roles in kind),
            offloaded=max(_offloaded(arithmetic, roles) for roles in kind),
        )
        for kind in kinds
    ]
    return tuple(sorted(memories, key=lambda gpu: -gpu.peak))


def gpus(config: Config) -> int:
    """GPUs of the whole fleet for forecasts; an explorer, regenerator or learner rank without a GPU counts as one."""
    pools = [
        (config.learner.world_size, config.fleet.learners),
        *((pool.count, pool) for pool in apart(config).values()),
    ]
    beyond_one = sum(count * (max(1, math.ceil(worker.num_gpus)) - 1) for count, worker in pools)
    return len(_placed(config)) + beyond_one + sum(count for count, worker in pools if not worker.num_gpus)


def _placed(config: Config) -> list[list[tuple[str, ...]]]:
    """The roles of the processes on each GPU."""
    return _first_fit(tuple(_in_turn(config)))


@lru_cache(maxsize=4)
def _first_fit(processes: tuple[tuple[tuple[str, ...], float], ...]) -> list[list[tuple[str, ...]]]:
    placed: list[list[tuple[str, ...]]] = []
    filled = defaultdict[float, list[int]](list)
    """Used share → heap of the GPUs with that share: there can be thousands of GPUs, but only few different shares."""
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
    """Processes with GPUs in the order of assignment: roles, share of a GPU."""
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
    processes = [queue[position] for position in range(longest) for queue in queues if position < len(queue)]
    return [(roles, min(1.0, gpus)) for roles, gpus in processes if gpus > 0]


def _process(arithmetic: Arithmetic, roles: tuple[str, ...]) -> ProcessMemory:
    config, facts, width = arithmetic.config, arithmetic.facts, DTYPE_BYTES[arithmetic.config.model.dtype]
    encode = {ENCODE: {"text encoders": facts.text_parameters * width}}
    if config.model.references:  # assumption: encoding a reference image needs as much memory as decoding an image
        encode[ENCODE]["autoencoder"] = facts.decoder_parameters * width + facts.decoding_bytes
    if roles == (ENCODER,):
        return ProcessMemory(roles=roles, holds={"CUDA context": CONTEXT}, stages=encode)
    samples, alone = roles != (LEARNER,), roles == (EXPLORER,)
    copied = facts.touched_parameters * width
    if alone:  # base copies for merging revisions: of its unquantised layers; with `publish.mode` lora, of all layers
        quantised = (facts.touched_parameters - facts.plain_touched_parameters) * (config.publish.mode == "lora")
        copied = facts.plain_touched_parameters * width + quantised * DTYPE_BYTES["bfloat16"]
    holds = {
        "transformer": facts.explorer_bytes if alone else arithmetic.weights_bytes,
        "copy of layers with LoRA": copied * samples,
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
        stages |= {ENCODE: encode[ENCODE] | {"offloaded weights": -_offloaded(arithmetic, roles)}}
    if LEARNER in roles:
        holds |= {"other": LEARNER_EXTRA, "LoRA policies, gradient and AdamW state": arithmetic.training_bytes}
        stages[LEARN] = _learning(arithmetic)
        if is_colocated(config.fleet) and arithmetic.packed_bytes:
            stages[PUBLISH] = {"packed weights": round(RESERVED * arithmetic.packed_bytes)}
    return ProcessMemory(roles=roles, holds={name: size for name, size in holds.items() if size}, stages=stages)


def _shares(roles: tuple[str, ...]) -> bool:
    """Whether the process has an explorer and other roles that share the model with it."""
    return EXPLORER in roles and len(roles) > 1


def _exploring(arithmetic: Arithmetic, roles: tuple[str, ...]) -> dict[str, Parts]:
    config, pool = arithmetic.config, pool_sampling(arithmetic.config)
    explore = {"micro-batch": _sampling(config.model, arithmetic.facts, pool.micro_batch)}
    if _shares(roles):
        copy = {"quantised copy": _quantized_copy(arithmetic)}
        # Each layer is offloaded as soon as its quantised copy exists, so they never add up.
        offloaded = {"offloaded weights": -_offloaded(arithmetic, roles)}
        return {EXPLORE: copy | offloaded | explore}
    return {EXPLORE: explore, PUBLISH: {"packed weights": round(RESERVED * arithmetic.packed_bytes)}}


def _regenerating(arithmetic: Arithmetic, roles: tuple[str, ...]) -> dict[str, Parts]:
    """Stages of a regenerator. Without offloading the quantised copy stays on the GPU, because a prompt is regenerated
    while others are explored.
    """
    config, facts = arithmetic.config, arithmetic.facts
    copy = {"quantised copy": _quantized_copy(arithmetic) * (_shares(roles) and not config.fleet.offload)}
    at_once = config.evaluation.prompts_at_once * config.evaluation.samples
    evaluate = {"micro-batch": _sampling(config.evaluated_model, facts, at_once)}
    regenerate = {"micro-batch": _sampling(config.model, facts, config.rollout.regenerate.micro_batch)}
    stages: dict[str, Parts] = {} if is_one_stage(config) else {REGENERATE: copy | regenerate}
    return stages | {EVALUATE: copy | evaluate}


def _learning(arithmetic: Arithmetic) -> dict[str, int]:
    """Memory of a learner's passes: RESERVED × micro-batch × (a + f). `a`: activations of a sample for its backward
    pass. `f`: the forward of the negative prompt, without gradient, while the activations are held; 0 unless learners
    train guided velocities. All other passes without gradient are done before activations exist.
    """
    config = arithmetic.config
    parts = {"activations": round(RESERVED * arithmetic.activation_bytes)}
    if trains_guided_velocity(config):
        forward = config.learner.micro_batch * arithmetic.facts.forward_bytes
        parts["forward of the negative prompt"] = round(RESERVED * forward)
    return parts


def _quantized_copy(arithmetic: Arithmetic) -> int:
    """Bytes of an explorer's transformer besides the layers that it shares with the base."""
    facts, width = arithmetic.facts, DTYPE_BYTES[arithmetic.config.model.dtype]
    return facts.explorer_bytes - (facts.parameters + facts.buffers - facts.quantized_parameters) * width


def _offloaded(arithmetic: Arithmetic, roles: tuple[str, ...]) -> int:
    """Bytes of the offloadable frozen weights: those of quantised layers without LoRA."""
    config, facts = arithmetic.config, arithmetic.facts
    if not config.fleet.offload or not _shares(roles):
        return 0
    touched = facts.touched_parameters - facts.plain_touched_parameters
    return (facts.quantized_parameters - touched) * DTYPE_BYTES[config.model.dtype]


def _sampling(model: Model, facts: ModelFacts, micro_batch: int) -> int:
    """Bytes to sample a micro-batch: its forward, twice as large with `cfg`, and its decoding. PyTorch's allocator
    keeps the memory of both.
    """
    at_once = min(model.decoding.micro_batch or micro_batch, micro_batch)
    images = 2 * 3 * model.shapes.largest.volume * FLOAT32_BYTES  # each image twice, because they are concatenated
    forward = facts.forward_bytes * model.cfg.velocities
    held = micro_batch * (forward + images) + at_once * facts.decoding_bytes
    return round(RESERVED * held)

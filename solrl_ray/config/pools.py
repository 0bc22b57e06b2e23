"""The worker pools of a fleet: their names, and which workers run in the processes of learner ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from solrl_ray.config.fleet import FleetConfig, WorkerPool, WorkerResources
from solrl_ray.config.schema import Config

EXPLORERS, REGENERATORS = "explorers", "regenerators"
"""Names of the pools."""


def pools(fleet: FleetConfig) -> dict[str, WorkerPool]:
    return {EXPLORERS: fleet.explorers, REGENERATORS: fleet.regenerators}


def resized(fleet: FleetConfig, sizes: Mapping[str, int]) -> FleetConfig:
    return fleet.changed({f"{pool}.count": size for pool, size in sizes.items()})


def shares(worker: WorkerResources) -> bool:
    """Whether a worker reserves only a fraction of a GPU."""
    return 0 < worker.num_gpus < 1


def is_colocated(fleet: FleetConfig) -> bool:
    """Whether explorer, regenerator and learner rank share one process and one copy of the model."""
    return fleet.placement == "colocated"


def is_on_a_card(config: Config, pool: str, slot: int) -> bool:
    """Whether this worker of a pool runs in a learner rank's process."""
    return is_colocated(config.fleet) and slot < config.learner.world_size


def on_cards(config: Config, pool: str) -> int:
    """Number of workers of a pool that run in learner ranks' processes; all others have separate processes."""
    return is_colocated(config.fleet) * min(pools(config.fleet)[pool].count, config.learner.world_size)


def apart(config: Config) -> dict[str, WorkerPool]:
    """The pools with only the workers in separate processes; pools without such workers are left out."""
    counts = {name: (pool, pool.count - on_cards(config, name)) for name, pool in pools(config.fleet).items()}
    return {name: pool.model_copy(update={"count": count}) for name, (pool, count) in counts.items() if count}


def reserved(config: Config, resource: Literal["num_cpus", "num_gpus"]) -> float:
    """CPUs or GPUs that all worker processes reserve together."""
    groups = [(config.learner.world_size, config.fleet.learners), *((p.count, p) for p in apart(config).values())]
    if not encodes_on_cards(config.fleet):
        groups.append((config.fleet.encoders.count, config.fleet.encoders))
    return sum(count * float(getattr(worker, resource)) for count, worker in groups)


def encodes_on_cards(fleet: FleetConfig) -> bool:
    """Whether each learner rank's GPU has an encoder, instead of `fleet.encoders`."""
    return is_colocated(fleet) and fleet.learners.num_gpus > 0


def encodes_here(fleet: FleetConfig) -> bool:
    """Whether the encoders run on the machine of the run folder, because they reserve no resources."""
    return not encodes_on_cards(fleet) and not (fleet.encoders.num_gpus or fleet.encoders.num_cpus)


def encoders(config: Config) -> int:
    """Number of encoders."""
    return config.learner.world_size if encodes_on_cards(config.fleet) else config.fleet.encoders.count


def encoder_of(fleet: FleetConfig) -> WorkerResources:
    """Resources of an encoder's process."""
    return fleet.learners if encodes_on_cards(fleet) else fleet.encoders


def encoding_batch(fleet: FleetConfig) -> int:
    """Texts per encoding batch."""
    return fleet.encoders.micro_batch or (16 if encoder_of(fleet).num_gpus else 1)


def encoded_ahead(fleet: FleetConfig) -> int:
    """Number of iterations whose prompts are encoded together."""
    return fleet.encoders.ahead or (16 if encodes_on_cards(fleet) else 1)


def needs_packed(config: Config, explorers: int) -> bool:
    """Whether at least one of this many `explorers` runs outside the learner ranks' processes."""
    return not is_colocated(config.fleet) or explorers > config.learner.world_size

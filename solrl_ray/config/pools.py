"""The pools of a fleet: their names, which workers are roles of a learner's card, which prompts each kind of explorers
gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from solrl_ray.config.fleet import FleetConfig, Worker, WorkerPool
from solrl_ray.config.schema import Config

REGENERATORS = "regenerators"
"""The name of their pool."""


def explorer_pools(fleet: FleetConfig) -> dict[str, WorkerPool]:
    return {"explorers": fleet.explorers, **{f"explorers_{other.name}": other for other in fleet.other_explorers}}


def pools(fleet: FleetConfig) -> dict[str, WorkerPool]:
    return {**explorer_pools(fleet), REGENERATORS: fleet.regenerators}


def explorers_in_all(fleet: FleetConfig) -> int:
    return sum(pool.count for pool in explorer_pools(fleet).values())


def key_of(fleet: FleetConfig, pool: str) -> str:
    """The key of a pool in the configuration: ``fleet.explorers``, ``fleet.other_explorers.0``."""
    names = [f"explorers_{other.name}" for other in fleet.other_explorers]
    return f"fleet.other_explorers.{names.index(pool)}" if pool in names else f"fleet.{pool}"


def resized(fleet: FleetConfig, sizes: Mapping[str, int]) -> FleetConfig:
    explorers, *others, regenerators = (
        pool.model_copy(update={"count": sizes.get(name, pool.count)}) for name, pool in pools(fleet).items()
    )
    return fleet.model_copy(update={"explorers": explorers, "other_explorers": others, "regenerators": regenerators})


def prompts_of(config: Config) -> dict[str, int]:
    """How many prompts of an iteration each pool explores."""
    others = {f"explorers_{other.name}": other.prompts for other in config.fleet.other_explorers}
    return {"explorers": config.rollout.prompts - sum(others.values()), **others}


def kinds_of_prompts(config: Config) -> tuple[str, ...]:
    """Which explorers get the prompt at each position of an iteration: the name of other explorers, empty for
    `explorers`.

    Empty if there are no others. Each kind's prompts are spread as evenly as possible, so that all begin and end
    together.
    """
    total = config.rollout.prompts
    quotas = {pool.partition("_")[2]: prompts for pool, prompts in prompts_of(config).items()}
    if len(quotas) == 1:
        return ()
    given = dict.fromkeys(quotas, 0)
    order = []
    for position in range(total):
        # The kind furthest behind its share of the first position + 1 prompts.
        kind = max(quotas, key=lambda name: quotas[name] * (position + 1) - given[name] * total)
        given[kind] += 1
        order.append(kind)
    return tuple(order)


def shares(worker: Worker) -> bool:
    """Whether a worker has only part of a GPU."""
    return 0 < worker.num_gpus < 1


def is_colocated(fleet: FleetConfig) -> bool:
    """Whether a card's roles share one process and one copy of the model."""
    return fleet.placement == "colocated"


def is_on_a_card(config: Config, pool: str, slot: int) -> bool:
    """Whether this worker of a pool is a role of a learner rank's card."""
    return is_colocated(config.fleet) and pool in ("explorers", REGENERATORS) and slot < config.learner.world_size


def on_cards(config: Config, pool: str) -> int:
    """How many workers of a pool are roles of learner ranks' processes; the others have their own."""
    return sum(is_on_a_card(config, pool, slot) for slot in range(pools(config.fleet)[pool].count))


def apart(config: Config) -> dict[str, WorkerPool]:
    """The pools with the workers that have processes of their own, if any."""
    counts = {name: (pool, pool.count - on_cards(config, name)) for name, pool in pools(config.fleet).items()}
    return {name: pool.model_copy(update={"count": count}) for name, (pool, count) in counts.items() if count}


def reserved(config: Config, resource: Literal["num_cpus", "num_gpus"]) -> float:
    """What all processes of workers reserve together."""
    groups = [(config.learner.world_size, config.fleet.learners), *((p.count, p) for p in apart(config).values())]
    if not encodes_on_cards(config.fleet):
        groups.append((config.fleet.encoders.count, config.fleet.encoders))
    return sum(count * float(getattr(worker, resource)) for count, worker in groups)


def encodes_on_cards(fleet: FleetConfig) -> bool:
    """Whether each learner rank's card has an encoder, instead of `fleet.encoders`."""
    return is_colocated(fleet) and fleet.learners.num_gpus > 0


def encoders(config: Config) -> int:
    """How many encoders there are."""
    return config.learner.world_size if encodes_on_cards(config.fleet) else config.fleet.encoders.count


def encoder_of(fleet: FleetConfig) -> Worker:
    """Resources of the process that an encoder lives in."""
    return fleet.learners if encodes_on_cards(fleet) else fleet.encoders


def encoding_batch(fleet: FleetConfig) -> int:
    """Texts that an encoder embeds at once."""
    return fleet.encoders.micro_batch or (16 if encoder_of(fleet).num_gpus else 1)


def encoded_ahead(fleet: FleetConfig) -> int:
    """How many iterations' prompts are encoded together."""
    return fleet.encoders.ahead or (16 if encodes_on_cards(fleet) else 1)


def needs_packed(config: Config, explorers: int) -> bool:
    """Whether one of so many `explorers`, or of others, is no role of a learner rank's card."""
    others = bool(config.fleet.other_explorers)
    return others or not is_colocated(config.fleet) or explorers > config.learner.world_size

"""Who shares GPUs with others, as the configuration has it."""

from __future__ import annotations

from solrl_ray.config.schema import FleetConfig, Worker


def shares(worker: Worker) -> bool:
    """Whether a worker has part of a GPU, the rest of which is others'."""
    return 0 < worker.num_gpus < 1


def takes_turns(fleet: FleetConfig) -> bool:
    """Whether learners share GPUs with explorers or regenerators, so that each must leave the other its memory."""
    return shares(fleet.learners) and (shares(fleet.explorers) or shares(fleet.regenerators))

"""Rewards behind one interface, one file each, and their weighted mixture."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from solrl_ray.config.schema import Reward as RewardConfig
from solrl_ray.errors import UserError
from solrl_ray.rewards.base import Reward
from solrl_ray.rewards.callables import CallableReward, import_callable
from solrl_ray.rewards.clipscore import CLIPScore
from solrl_ray.rewards.mixture import RewardMixture

__all__ = ["Reward", "RewardMixture", "import_callable", "load"]

REGISTERED: dict[str, type[CLIPScore]] = {"clipscore": CLIPScore}
"""Rewards by the name they have in a configuration."""


def load(configs: Sequence[RewardConfig], device: torch.device | str) -> RewardMixture:
    """Load every reward of a configuration's ``rewards`` onto `device`.

    Raises `UserError` naming the entry if its kind is unknown or its checkpoint or function cannot be loaded.
    """
    return RewardMixture([(_load(config, i, device), config.weight) for i, config in enumerate(configs)])


def _load(config: RewardConfig, index: int, device: torch.device | str) -> Reward:
    key, name = f"rewards[{index}]", f"rewards[{index}] ({config.kind})"
    if config.kind in REGISTERED:
        return REGISTERED[config.kind].load(config.path, device, key=f"{key}.path", name=name)
    if ":" not in config.kind:
        raise UserError(
            f"{key}.kind is {config.kind!r}, which is neither a registered reward "
            f"({', '.join(sorted(REGISTERED))}) nor of the form 'module:function'."
        )
    if config.path:
        raise UserError(f"{key}.path is {config.path!r}, but a function ({config.kind}) takes no path; leave it out.")
    return CallableReward(name, import_callable(config.kind, f"{key}.kind"), device)

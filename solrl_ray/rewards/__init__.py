"""Rewards with a common interface, one file each, and their weighted mixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from solrl_ray.common.lazy_imports import import_large
from solrl_ray.common.progress_note import progress_note
from solrl_ray.config import reward_kinds
from solrl_ray.config.reward_kinds import FUNCTION, kind_of
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.errors import NotYetThere, UserError
from solrl_ray.records import SampleShape
from solrl_ray.rewards.base import VIDEOS, CheckpointReward, Keys, Reward
from solrl_ray.rewards.callables import CallableReward, import_callable
from solrl_ray.rewards.mixture import Framewise, RewardMixture, Weighted

__all__ = ["Reward", "RewardMixture", "check", "import_callable", "load", "load_one"]


def check(
    configs: Sequence[RewardConfig],
    shapes: Sequence[SampleShape],
    named: Callable[[str], str],
    *,
    tell: Callable[[NotYetThere], None] | None = None,
) -> None:
    """Check that every reward can be loaded and takes samples of these shapes. Loads no weights.

    Args:
        named: converts a dotted key such as ``rewards.0.path`` to its name in a message.
        tell: called with the error of each missing checkpoint, and no server is asked: a plan of a stranger's
            configuration must send nothing. None: errors are raised, and servers and judges must answer.

    Raises UserError with one sentence that names the key, its value and the remedy.
    """
    for i, config in enumerate(configs):
        keys = _named(i, named)
        try:
            reward_class = registered(config, keys)
            reward_kinds.check_frames(config, keys, shapes[0].frames)
            reward_class.check(config, keys, shapes)
            if tell is None:
                reward_class.reach(config, keys, shapes)
        except NotYetThere as error:
            if tell is None:
                raise
            tell(error)


def load(configs: Sequence[RewardConfig], device: torch.device | str) -> RewardMixture:
    """Load every reward of a configuration's ``rewards`` onto `device`.

    Raises `UserError` naming the entry if its kind is unknown or its checkpoint or function cannot be loaded.
    """
    return RewardMixture([_load(config, i, device) for i, config in enumerate(configs)])


def registered(config: RewardConfig, keys: Keys) -> type[CheckpointReward]:
    """The class of a reward; its configuration entry is checked.

    Raises UserError if the kind is unknown, a library or field is missing, or the kind does not read a given field.
    """
    reward_kinds.check(config, keys)
    kind = kind_of(config)
    if kind is FUNCTION:
        return CallableReward
    module, _, name = kind.source.partition(":")
    try:
        reward_class: type[CheckpointReward] = getattr(import_large(f"solrl_ray.rewards.{module}"), name)
        return reward_class
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision built for another torch
        raise UserError(
            f"{keys('kind')} is {config.kind!r}, whose library cannot be imported ({error}); "
            f"install the extra of this package, in its clone: pip install -e '.[{kind.extra}]'"
        ) from error


def load_one(config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> Reward:
    """Load one reward. A reward of images with `frames` becomes a reward of videos."""
    reward = registered(config, keys)(config, device, keys=keys, name=name)
    if config.frames is None or config.frames.combine == "together":
        return reward
    if reward.ndims == (VIDEOS,):
        raise UserError(f"{keys('kind')} is {config.kind!r}, which scores whole videos; leave out its frames.")
    return Framewise(reward, config.frames)


def _load(config: RewardConfig, index: int, device: torch.device | str) -> Weighted:
    name = f"rewards[{index}] ({config.kind})"
    with progress_note(f"loading the reward {config.kind}"):
        reward = load_one(config, device, keys=lambda field: f"rewards[{index}].{field}", name=name)
    scale = config.normalize.model_dump() if config.normalize is not None else {}
    return Weighted(reward, config.weight, **scale)


def _named(index: int, named: Callable[[str], str]) -> Keys:
    return lambda field: named(f"rewards.{index}.{field}")

"""Functions of the user's own, named in the configuration as ``module:function``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from solrl_ray.config.schema import RewardConfig
from solrl_ray.errors import RewardError, UserError
from solrl_ray.rewards.base import CheckpointReward, Keys


def import_callable(spec: str, key: str) -> Callable[..., Any]:
    """Import ``module:function``.

    Raises `UserError` naming `key` if the module or the function in it is not there, or it cannot be called.
    """
    module_name, _, function_name = spec.partition(":")
    if not module_name or not function_name:
        raise UserError(f"{key} is {spec!r}, which is not of the form 'module:function'.")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise UserError(f"{key} is {spec!r}, but the module {module_name} cannot be imported: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"{key} is {spec!r}, but {module_name} has no function {function_name}.")
    return function


class CallableReward(CheckpointReward):
    """``f(images, prompts)``: images [B, 3, H, W] float32 in [0, 1], B texts; a tensor [B] back."""

    options = frozenset()

    def __init__(self, name: str, function: Callable[[Tensor, list[str]], Tensor], device: torch.device | str) -> None:
        super().__init__(name)
        self._function = function
        self._device = device

    @classmethod
    def check(cls, config: RewardConfig, keys: Keys, resolution: int) -> None:
        import_callable(config.kind, keys("kind"))

    @classmethod
    def load(cls, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> CallableReward:
        return cls(name, import_callable(config.kind, keys("kind")), device)

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        try:
            values = self._function(images.to(self._device, torch.float32), list(prompts))
        except Exception as error:  # whatever the user's function raises: say whose it is, keep the cause
            raise RewardError(f"Reward {self.name} failed with {type(error).__name__}: {error}") from error
        if not isinstance(values, Tensor):
            raise RewardError(f"Reward {self.name} returned a {type(values).__name__}, not a tensor.")
        return values

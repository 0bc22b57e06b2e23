"""Runs the user's functions: rewards, and functions that draw real images.

They are imported by name. Errors name file and line; default dtype and random states are restored after each call.
"""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from solrl_ray.common import own_code
from solrl_ray.common.own_code import OwnCode
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.config.schema import EvaluationConfig
from solrl_ray.errors import RewardError, UserError
from solrl_ray.records import Address, SampleShape
from solrl_ray.rewards.base import VIDEOS, CheckpointReward, Keys, parameters, seen, wanted_by

VIDEO_PARAMETERS = ("video", "videos")
"""Names of a reward function's first parameter with which it gets videos."""


def import_callable(spec: str, key: str, code: OwnCode | None = None) -> Callable[..., Any]:
    """Import a function.

    Args:
        spec: ``module:function`` or ``file.py:function``.
        key: configuration key, for error messages.
        code: files of the function; None: search the current folder and Python's path.

    Raises UserError naming `key` if the module or the function is missing, or is not callable.
    """
    place, name = own_code.split(spec, key)
    code = code or own_code.find(spec, key)
    try:
        with state_kept():
            module: ModuleType = own_code.load(code) if code else import_module(place)
    except Exception as error:  # the user's file may raise anything
        what = f"the {'file' if own_code.names_file(place) else 'module'} {place} cannot be imported"
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{key} is {spec!r}, but {what}: {reason}{where(error, code)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{key} is {spec!r}, but {place} has no function {name}.")
    return function


def where(error: BaseException, code: OwnCode | None) -> str:
    """File and line in the user's files that raised `error`, to append to a sentence; empty if there is none."""
    files = {file.path for file in code.files} if code else set()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def real_pictures(
    config: EvaluationConfig, key: str, prompt: str, addresses: Sequence[Address], references: Tensor | None = None
) -> Tensor:
    """Real images of a prompt, one per address, drawn by `evaluation.reference`: float32 [n, 3, H, W] in [0, 1].

    `references`: reference images of the prompt, float32 [n, 3, H, W] in [0, 1]. A function with a parameter named in
    `base.SEEN` gets copies: ``reference`` [3, H, W], ``references`` all of them.

    Raises UserError naming `key`, as `import_callable`; RewardError if the function fails or returns no such image.
    """
    code = config._own or own_code.find(config.reference, key)
    draw = import_callable(config.reference, key, code)
    wanted, images = wanted_by(draw), list[Tensor]()
    for address in addresses:
        copies = seen(wanted, None if references is None else references.clone()[None])
        given = {name: None if value is None else value[0] for name, value in copies.items()}
        images.append(_drawn(partial(draw, prompt, address, **given), config.reference, prompt, code))
    return torch.stack(images)


def _drawn(draw: Callable[[], Any], name: str, prompt: str, code: OwnCode | None) -> Tensor:
    try:
        with state_kept():
            image = torch.as_tensor(draw()).float()
    except Exception as error:  # the user's function may raise anything, or not return a tensor
        problem = f"{name} failed with {type(error).__name__}: {error}{where(error, code)}"
        raise RewardError(f"{problem}, for the prompt {prompt!r}") from error
    if image.ndim != 3 or image.shape[0] != 3 or not image.numel():
        raise RewardError(f"{name} drew an image of shape {list(image.shape)}; expected [3, height, width].")
    low, high = float(image.min()), float(image.max())
    if not 0 <= low <= high <= 1:  # NaN fails too
        raise RewardError(
            f"{name} drew an image with values from {low:g} to {high:g} for the prompt {prompt!r}; expected "
            "numbers from 0 to 1."
        )
    return image


class CallableReward(CheckpointReward):
    """A user's function ``f(images, prompts)`` as a reward.

    It gets a copy of the images, float32 [B, 3, H, W] in [0, 1], and B texts. It returns B numbers, as a tensor, an
    array or a list. If the first parameter is named ``video`` or ``videos``, it gets videos [B, 3, T, H, W]. With a
    parameter named in `base.SEEN` it also gets copies of the reference images.
    """

    def __init__(self, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> None:
        super().__init__(config, device, keys=keys, name=name)
        self._code = config._own or own_code.find(config.kind, keys("kind"))
        self._function = import_callable(config.kind, keys("kind"), self._code)
        self._wanted = wanted_by(self._function)
        if next(iter(parameters(self._function)), "") in VIDEO_PARAMETERS:
            self.ndims = (VIDEOS,)

    @classmethod
    def check(cls, config: RewardConfig, keys: Keys, shapes: Sequence[SampleShape]) -> None:
        """Check that the function's files are found. It executes nothing: `rewards.trial` does, in a child process."""
        if config._own is None:
            own_code.find(config.kind, keys("kind"))

    def compute(self, images: Tensor, prompts: Sequence[str], references: Tensor | None = None) -> Tensor:
        copy = images.to(self._device, torch.float32, copy=True)
        if references is not None and self._wanted:
            references = references.to(self._device, copy=True)
        try:
            with state_kept():
                values = self._function(copy, list(prompts), **seen(self._wanted, references))
        except Exception as error:  # the user's function may raise anything
            raise RewardError(
                f"Reward {self.name} failed with {type(error).__name__}: {error}{where(error, self._code)}"
            ) from error
        return self._as_tensor(values)

    def _as_tensor(self, values: Any) -> Tensor:
        if isinstance(values, list | tuple):
            try:
                values = torch.tensor([float(value) for value in values], dtype=torch.float32)
            except (TypeError, ValueError) as error:
                raise RewardError(f"Reward {self.name} returned a list with a non-number: {error}.") from error
        elif isinstance(values, np.ndarray) and np.isrealobj(values) and values.dtype.kind in "fiu":
            values = torch.from_numpy(values.astype(np.float32))
        if not isinstance(values, Tensor) or values.is_complex():
            what = f"a tensor of {values.dtype}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise RewardError(
                f"Reward {self.name} returned {what}; expected one number per image, as a tensor or a list."
            )
        return values


def _umask() -> int:
    mask = os.umask(0o077)  # setting it is the only way to read it
    os.umask(mask)
    return mask


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return "/"


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (_folder, os.chdir),
    (_umask, os.umask),
)
"""Getters and setters of process settings that affect the bits of later units, or the place and mode of their files."""


@contextmanager
def state_kept() -> Iterator[None]:
    """Restore the random states and `_SETTINGS` after the user's code: a score must not depend on earlier units."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    settings = [get() for get, _ in _SETTINGS]
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        for (get, put), before in zip(_SETTINGS, settings, strict=True):
            if get() != before:
                put(before)

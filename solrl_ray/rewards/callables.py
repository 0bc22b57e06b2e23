"""The user's own functions as rewards or as painters of real pictures: imported by name, errors with their place,
default dtype and random states put back.
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
"""Names of a function's first parameter that ask for videos."""


def import_callable(spec: str, key: str, code: OwnCode | None = None) -> Callable[..., Any]:
    """Import a function.

    Args:
        spec: ``module:function`` or ``file.py:function``.
        key: the key to name in a message.
        code: its files; None: search the present folder and Python's path.

    Raises `UserError` naming `key` if the module or the function is missing or cannot be called.
    """
    place, name = own_code.split(spec, key)
    code = code or own_code.find(spec, key)
    try:
        with state_kept():
            module: ModuleType = own_code.load(code) if code else import_module(place)
    except Exception as error:  # the user's file may raise anything
        what = f"the {'file' if own_code.names_file(place) else 'module'} {place} cannot be imported"
        said = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{key} is {spec!r}, but {what}: {said}{where(error, code)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{key} is {spec!r}, but {place} has no function {name}.")
    return function


def where(error: BaseException, code: OwnCode | None) -> str:
    """The last place in the user's files that raised `error`, to be added to a sentence; empty if there is none."""
    files = {file.path for file in code.files} if code else set()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def real_pictures(
    config: EvaluationConfig, key: str, prompt: str, addresses: Sequence[Address], references: Tensor | None = None
) -> Tensor:
    """Pictures of a prompt, one an address, drawn by `evaluation.reference`: float32 [n, 3, H, W] in [0, 1].

    `references`: the prompt's, float32 [n, 3, H, W] in [0, 1]. A function with a parameter named as in `base.SEEN` gets
    copies: [3, H, W], or all.

    Raises `UserError` naming `key` as `import_callable`; `RewardError` if the function fails, or draws what is no such
    picture.
    """
    code = config._own or own_code.find(config.reference, key)
    draw = import_callable(config.reference, key, code)
    wanted, pictures = wanted_by(draw), list[Tensor]()
    for address in addresses:
        own = seen(wanted, None if references is None else references.clone()[None])
        given = {name: None if value is None else value[0] for name, value in own.items()}
        pictures.append(_drawn(partial(draw, prompt, address, **given), config.reference, prompt, code))
    return torch.stack(pictures)


def _drawn(draw: Callable[[], Any], name: str, prompt: str, code: OwnCode | None) -> Tensor:
    try:
        with state_kept():
            picture = torch.as_tensor(draw()).float()
    except Exception as error:  # whatever the user's function raises, or returns instead of a tensor
        said = f"{name} failed with {type(error).__name__}: {error}{where(error, code)}"
        raise RewardError(f"{said}, for the prompt {prompt!r}") from error
    if picture.ndim != 3 or picture.shape[0] != 3 or not picture.numel():
        raise RewardError(f"{name} drew a picture of shape {list(picture.shape)}; right would be [3, height, width].")
    low, high = float(picture.min()), float(picture.max())
    if not 0 <= low <= high <= 1:  # NaN fails too
        raise RewardError(
            f"{name} drew a picture with values from {low:g} to {high:g} for the prompt {prompt!r}; right would be "
            "numbers from 0 to 1."
        )
    return picture


class CallableReward(CheckpointReward):
    """``f(images, prompts)``: images [B, 3, H, W] float32 in [0, 1], a copy of its own, B texts; B numbers back, as a
    tensor, an array or a list. ``f(video, prompts)`` or ``f(videos, prompts)``: videos [B, 3, T, H, W] instead. With a
    parameter named as in `base.SEEN` it gets copies of the references.
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
        """Executes nothing: `rewards.trial` does that in a child process."""
        if config._own is None:
            own_code.find(config.kind, keys("kind"))

    def compute(self, images: Tensor, prompts: Sequence[str], references: Tensor | None = None) -> Tensor:
        own = images.to(self._device, torch.float32, copy=True)
        if references is not None and self._wanted:
            references = references.to(self._device, copy=True)
        try:
            with state_kept():
                values = self._function(own, list(prompts), **seen(self._wanted, references))
        except Exception as error:  # the user's function may raise anything: name it, keep the cause
            raise RewardError(
                f"Reward {self.name} failed with {type(error).__name__}: {error}{where(error, self._code)}"
            ) from error
        return self._as_tensor(values)

    def _as_tensor(self, values: Any) -> Tensor:
        if isinstance(values, list | tuple):
            try:
                values = torch.tensor([float(value) for value in values], dtype=torch.float32)
            except (TypeError, ValueError) as error:
                raise RewardError(f"Reward {self.name} returned a list with what is no number: {error}.") from error
        elif isinstance(values, np.ndarray) and np.isrealobj(values) and values.dtype.kind in "fiu":
            values = torch.from_numpy(values.astype(np.float32))
        if not isinstance(values, Tensor) or values.is_complex():
            what = f"a tensor of {values.dtype}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise RewardError(
                f"Reward {self.name} returned {what}; right would be one number an image, as a tensor or a list."
            )
        return values


def _umask() -> int:
    mask = os.umask(0o077)  # there is no other way to see it
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
"""Settings of the process that decide the bits of later units, or where and how their files are written: how each is
read and set.
"""


@contextmanager
def state_kept() -> Iterator[None]:
    """Restore the random states and `_SETTINGS` if the user's code changes them: a score must not depend on which unit
    the process did before.
    """
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

"""PyTorch and diffusers, imported on first use. A plan reads the files of families without using these libraries, whose
import takes seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from solrl_ray.common.lazy_imports import import_large

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:
    import diffusers as diffusers
    import torch as torch
else:

    class _Library:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return import_large(self._name, attribute)

    torch, diffusers = _Library("torch"), _Library("diffusers")


class Stock:
    """A class attribute whose value is a class of diffusers, looked up on access."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        return getattr(diffusers, self._name)


def no_grad(function: Callable[P, R]) -> Callable[P, R]:
    """``@torch.no_grad()``, without importing PyTorch when the function is defined."""

    @functools.wraps(function)
    def wrapped(*arguments: P.args, **named: P.kwargs) -> R:
        with torch.no_grad():
            return function(*arguments, **named)

    return wrapped

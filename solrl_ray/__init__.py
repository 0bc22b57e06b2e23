"""Sol-RL on Ray: fine-tunes image and video diffusion models with reinforcement learning.

Low-precision previews pick the seeds worth training on, and full-precision samples of these train the model.

Python interface: `plan`, `train`, `resume` (`solrl_ray.interface`). Command line: ``solrl``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from solrl_ray.interface import Plan, Run, RunError, UserError, plan, resume, train

__version__ = "0.1.0"
__all__ = ["Plan", "Run", "RunError", "UserError", "plan", "resume", "train"]


def __getattr__(name: str) -> Any:
    """Import names of the interface when they are first used, so that importing the package stays fast."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from solrl_ray import interface

    return getattr(interface, name)

"""Sol-RL on Ray: low-precision explorers rank, full-precision regenerators teach, a DeepSpeed group learns.

From Python: `plan`, `train`, `resume` (`solrl_ray.interface`). On the command line: ``solrl``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from solrl_ray.interface import Plan, Run, RunError, UserError, plan, resume, train

__version__ = "0.1.0"
__all__ = ["Plan", "Run", "RunError", "UserError", "plan", "resume", "train"]


def __getattr__(name: str) -> Any:
    """The names of the interface, imported when one is first used: importing the package stays fast."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from solrl_ray import interface

    return getattr(interface, name)

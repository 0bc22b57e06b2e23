"""A process that hosts all roles on one GPU. They share one copy of the model and are lost together.

One thread runs their calls in the order sent; only `abort` runs in another thread.
"""

from __future__ import annotations

from typing import Any, ClassVar

import ray

from actors.cluster import progress_notes, termination
from actors.cluster.rpc import Callee
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.gpu.shared_model import SharedModel


class GpuProcess(Callee):
    CONCURRENCY_GROUPS: ClassVar[dict[str, int]] = {"abort": 1}
    """Ray's concurrency groups → number of threads.

    With such groups, Ray runs only the constructor in the main thread. It must install signal handlers there, as
    Python requires.
    """

    def __init__(self, name: str, config: Config) -> None:
        self._name = name
        self._roles: dict[str, Any] = {}
        self._failed: dict[str, Exception] = {}
        """Role name → the error raised while the role was created."""
        self._model = SharedModel(config)
        termination.listen()

    def _title(self) -> str:
        return self._name

    def host(self, name: str, role: type, *arguments: Any) -> None:
        """Create a role in this process: an explorer, regenerator, learner rank or text encoder.

        This call is not awaited, so the next call of the role raises the error, if any.
        """
        try:
            made = role(*arguments)
            made.share(self._model)
            self._roles[name] = made
        except Exception as error:
            self._failed[name] = error

    def dismiss(self, name: str) -> None:
        """End a role; the others stay."""
        self._failed.pop(name, None)
        role = self._roles.pop(name, None)
        if role is not None:
            role.leave()

    def call_as(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a role's method."""
        if name in self._failed:
            raise self._failed[name]
        if name not in self._roles:
            raise RunError(f"{name} is called after it has left {self._name}")
        progress_notes.speak_as(name)
        return getattr(self._roles[name], method)(*arguments)

    @ray.method(concurrency_group="abort")
    def abort(self, name: str) -> None:
        """Call `LearnerRank.abort` of a role while another of its calls waits."""
        role = self._roles.get(name)
        if role is not None:
            role.abort()

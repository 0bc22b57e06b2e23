"""The process of a card: it hosts the card's roles, which share one copy of the model and are lost together.

Its one thread does their calls in the order in which they were sent.
"""

from __future__ import annotations

from typing import Any

from actors.cluster import progress_notes
from actors.cluster.rpc import Callee, done
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.gpu.shared_model import SharedModel


class Card(Callee):
    def __init__(self, name: str, config: Config) -> None:
        self._name = name
        self._roles: dict[str, Any] = {}
        self._model = SharedModel(config)

    def __repr__(self) -> str:
        return self._name

    def host(self, name: str, role: type, *arguments: Any) -> None:
        """Take a role in: an explorer, regenerator or learner rank."""
        self._roles[name] = role(*arguments)
        self._roles[name].share(self._model)

    def dismiss(self, name: str) -> None:
        """End a role; the others stay."""
        role = self._roles.pop(name, None)
        if role is not None:
            role.leave()

    def do_as(self, name: str, packed: bytes, *references: Any) -> Any:
        """`Callee.do` of a role."""
        return done(self._role(name), packed, *references)

    def call_as(self, name: str, method: str, *arguments: Any) -> Any:
        """A role's method, with arguments that only Ray's own pickling passes on: lists of references."""
        return getattr(self._role(name), method)(*arguments)

    def _role(self, name: str) -> Any:
        if name not in self._roles:
            raise RunError(f"{name} is called after it has left {self._name}")
        progress_notes.speak_as(name)
        return self._roles[name]

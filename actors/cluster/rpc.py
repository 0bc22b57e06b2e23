"""Base class of the actors that the controller calls."""

from __future__ import annotations

import ray

from actors.cluster import progress_notes, termination


class Callee:
    """Base of the actors that the controller calls. `ControllerActor`, which other processes call, is a plain actor."""

    def __repr__(self) -> str:
        """Title in Ray's dashboard and before each log line of the process.

        Ray also calls it after a failed constructor, and an error here would hide the constructor's error.
        """
        try:
            return self._title()
        except Exception:
            return type(self).__name__

    def _title(self) -> str:
        return type(self).__name__

    def send_notes(self, name: str, receiver: str, namespace: str) -> None:
        """See `progress_notes.send_to`."""
        progress_notes.send_to(receiver, namespace, name=name)

    def node(self) -> str:
        """Id of this actor's node."""
        return str(ray.get_runtime_context().get_node_id())

    def alive(self, name: str) -> None:
        """Return at once, to show that the actor is alive. Raises Leaving after SIGTERM, so that an idle actor leaves
        too.
        """
        termination.check(name)

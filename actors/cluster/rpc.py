"""What the actors that the controller calls have in common."""

from __future__ import annotations

import ray

from actors.cluster import progress_notes, termination


class Callee:
    """Base of the actors that the controller calls. `ControllerActor`, which other processes call, is a plain actor."""

    def __repr__(self) -> str:
        """Ray shows it in its dashboard and before each line that the process logs, and asks for it also if the
        constructor raised: an error here would be reported in place of that one.
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
        """Return, as proof that the actor lives. Raises Leaving after SIGTERM, so that an idle actor notices it."""
        termination.check(name)

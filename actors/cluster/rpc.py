"""What the actors that the controller calls have in common."""

from __future__ import annotations

import ray

from actors.cluster import progress_notes, termination


class Callee:
    """Base of the actors that the controller calls. `ControllerActor`, which other processes call, is a plain actor.

    Ray shows an actor's `repr` in its dashboard and before each line that its process logs.
    """

    def send_notes(self, name: str, receiver: str, namespace: str) -> None:
        """See `progress_notes.send_to`."""
        progress_notes.send_to(receiver, namespace, name=name)

    def node(self) -> str:
        """Id of this actor's node."""
        return str(ray.get_runtime_context().get_node_id())

    def alive(self, name: str) -> None:
        """Return, as proof that the actor lives. Raises Leaving after SIGTERM, so that an idle actor notices it."""
        termination.check(name)

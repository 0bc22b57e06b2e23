"""Calls actors with arguments that are pickled once, as bytes, which Ray passes on unchanged.

Ray pickles each argument separately, which takes longer than the rest of a call (docs/decisions/pushed-units.md).
`Callee.do` unpacks the arguments, so a handler has an ordinary signature.
"""

from __future__ import annotations

import pickle
from typing import Any

import ray

from actors.cluster import progress_notes, termination


class Callee:
    """Base of the actors that the controller calls. `ControllerActor`, which other processes call, is a plain actor.

    Ray shows an actor's `repr` in its dashboard and before each line that its process logs.
    """

    def do(self, packed: bytes, *references: Any) -> Any:
        """The result of the called handler; `references`: its arguments by reference, in order."""
        return done(self, packed, *references)

    def send_notes(self, name: str, receiver: str, namespace: str) -> None:
        """See `progress_notes.send_to`."""
        progress_notes.send_to(receiver, namespace, name=name)

    def node(self) -> str:
        """Id of this actor's node."""
        return str(ray.get_runtime_context().get_node_id())

    def alive(self, name: str) -> None:
        """Return, as proof that the actor lives. Raises Leaving after SIGTERM, so that an idle actor notices it."""
        termination.check(name)


def done(callee: Any, packed: bytes, *references: Any) -> Any:
    """The result of a handler of `callee`."""
    method, arguments = pickle.loads(packed)
    given = iter(references)
    return getattr(callee, method)(*(next(given) if argument is ... else argument for argument in arguments))


def send(actor: Any, name: str, method: str, *arguments: Any, parts: int = 1, role: str = "") -> Any:
    """Call a handler as ``actor.method.remote(*arguments)`` does, but faster.

    Args:
        actor: handle of a `Callee`.
        name: shown in process titles and Ray's lists of tasks.
        parts: number of parts of the result, each with its own reference.
        role: the role of a card that does the call; by default the actor itself does.
    """
    references = [argument for argument in arguments if isinstance(argument, ray.ObjectRef)]
    values = [... if isinstance(argument, ray.ObjectRef) else argument for argument in arguments]
    packed = pickle.dumps((method, values), pickle.HIGHEST_PROTOCOL)
    if role:
        return actor.do_as.options(num_returns=parts, name=name).remote(role, packed, *references)
    return actor.do.options(num_returns=parts, name=name).remote(packed, *references)

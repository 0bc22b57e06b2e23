"""How actors are called: arguments are pickled once, as bytes, which Ray passes on as they are.

Ray itself pickles each argument by itself and so that it could be of any kind, which takes longer than all else of a
call (docs/decisions/pushed-units.md). A handler's signature stays what it is: `Callee.do` gives it its arguments back.
"""

from __future__ import annotations

import pickle
from typing import Any

import ray

from actors.cluster import progress_notes, termination


class Callee:
    """Base of the actors that the controller calls. `ControllerActor`, which others call, is a plain actor."""

    def do(self, packed: bytes, *references: Any) -> Any:
        """What the handler that was called answers; `references`: its arguments by reference, in their order."""
        method, arguments = pickle.loads(packed)
        given = iter(references)
        return getattr(self, method)(*(next(given) if argument is ... else argument for argument in arguments))

    def do_each(self, method: str, arguments: list[Any]) -> tuple[Any, ...]:
        """None, and what a handler answers to each of the arguments: as many parts as there are of them, and one."""
        return None, *(getattr(self, method)(argument) for argument in arguments)

    def send_notes(self, name: str, receiver: str, namespace: str) -> None:
        """See `progress_notes.send_to`."""
        progress_notes.send_to(receiver, namespace, name=name)

    def node(self) -> str:
        """Id of the node that this actor is on."""
        return str(ray.get_runtime_context().get_node_id())

    def alive(self, name: str) -> None:
        """Nothing, of an actor that lives. Raises Leaving after SIGTERM: one that has nothing to do notices it so."""
        termination.check(name)


def send(actor: Any, name: str, method: str, *arguments: Any, parts: int = 1) -> Any:
    """Call a handler: as ``actor.method.remote(*arguments)``, in less time.

    Args:
        actor: handle of a `Callee`.
        name: what process titles and Ray's lists of tasks show.
        parts: of its answer, each with a reference of its own.
    """
    references = [argument for argument in arguments if isinstance(argument, ray.ObjectRef)]
    values = [... if isinstance(argument, ray.ObjectRef) else argument for argument in arguments]
    do = actor.do.options(num_returns=parts, name=name)
    return do.remote(pickle.dumps((method, values), pickle.HIGHEST_PROTOCOL), *references)

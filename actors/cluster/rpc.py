"""How workers and the selector are sent records: pickled once, as bytes, which Ray passes on as they are.

Ray itself pickles each argument by itself and so that it could be of any kind, which takes longer than all else of a
call. A handler's signature stays what it is: `Callee.do` gives it its arguments back.
"""

from __future__ import annotations

import pickle
from typing import Any

import ray


class Callee:
    """Base of actors that are called with `send`."""

    def do(self, packed: bytes, *references: Any) -> Any:
        """What the handler that was called answers.

        Args:
            references: what its arguments by reference refer to, in their order.
        """
        method, arguments = pickle.loads(packed)
        given = iter(references)
        return getattr(self, method)(*(next(given) if argument is ... else argument for argument in arguments))


def send(actor: Any, role: str, method: str, *arguments: Any, parts: int = 1) -> Any:
    """Call a handler: as ``actor.method.remote(*arguments)``, in less time.

    Args:
        actor: handle of a `Callee`.
        role: which part it plays, for the name that process titles and Ray's lists of tasks have.
        parts: of its answer, each with a reference of its own.
    """
    references = [argument for argument in arguments if isinstance(argument, ray.ObjectRef)]
    values = [... if isinstance(argument, ray.ObjectRef) else argument for argument in arguments]
    do = actor.do.options(num_returns=parts, name=f"{role}.{method}")
    return do.remote(pickle.dumps((method, values), pickle.HIGHEST_PROTOCOL), *references)

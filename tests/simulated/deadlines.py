"""Which of `fleet.deadlines` a call has, as the descriptions of these keys say: written down a second time."""

from __future__ import annotations

import re
from typing import Any

from solrl_ray.config.pools import encodes_on_cards
from solrl_ray.config.schema import Config
from solrl_ray.records import WorkUnit

LEARNERS = {
    **dict.fromkeys(("start", "node", "address", "join", "load"), "start"),
    **dict.fromkeys(("offer", "update", "state"), "update"),
    **dict.fromkeys(("shard", "factors"), "publish"),
    "warm_up": "warm_up",
}
SAMPLERS = {
    "explore": "explore",
    **dict.fromkeys(("sample", "regenerate", "evaluate"), "regenerate"),
    "start": "start",
    "warm_up": "warm_up",
    **dict.fromkeys(("prepare", "load_revision"), "publish"),
    "alive": "fetch",
}


def deadline(config: Config, role: str, method: str, arguments: tuple[Any, ...]) -> float | None:
    """Seconds; None for a place in the cluster, whose wait has a limit of its own."""
    deadlines = config.fleet.deadlines
    if role == "selector":
        return deadlines.selector
    if role == "text_encoder":
        load = deadlines.start * encodes_on_cards(config.fleet)
        items = (1 + config.model.references) * (len(arguments[0]) if arguments else 0)
        return deadlines.encode * items + load if method == "embed" else deadlines.start
    if role == "learner":
        return 4 * deadlines.fetch if method == "feed" else getattr(deadlines, LEARNERS[method])
    if method == "node":
        return None
    seconds: float = getattr(deadlines, SAMPLERS[method])
    if method == "explore":
        return seconds * len(arguments[0].indices) / config.rollout.explore.micro_batch
    if method == "evaluate":
        return seconds * next(1 + len(each.beside) for each in arguments if isinstance(each, WorkUnit))
    return seconds


def check_named(config: Config, what: str, seconds: float) -> None:
    """A wait that names its deadline has that."""
    for name in re.findall(r"\(fleet\.deadlines\.(\w+)\)", what):
        assert seconds == getattr(config.fleet.deadlines, name), f"{what} has {seconds:g} s"

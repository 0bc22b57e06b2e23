"""``solrl eval`` of a live run: the run's own regenerators evaluate, beside its updates.

    checkpoint ─► merger (on a CPU): a revision a policy ─► controller (`actors.evaluation.requests`) ─► scores

Addresses, micro-batch shape and kind of worker are the same as when no run is live. So the scores have the same bytes
within a score class. The run's results do not change: a regenerator loads and proves the run's revision again before it
gets the run's units.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from actors.client import live_run
from actors.client.connect import joined
from actors.client.evaluate import Merger, Request, merged, write
from actors.client.launch import UNANSWERED, located
from actors.cluster import wait
from actors.cluster.names import namespace
from actors.evaluation.requests import EvaluationRequest, Found, RequestProgress
from actors.fleet.actor_factory import Actor, ActorClasses, ActorFactory, on_this_node
from actors.ray_world import RayWorld
from solrl_ray.config.continuation import stored
from solrl_ray.config.fleet import Learners
from solrl_ray.config.schema import Config
from solrl_ray.errors import Late, RunError, WorkerGone
from solrl_ray.evaluation.request import obstacle
from solrl_ray.learning.state import LearnerState
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.weight_sync.publication import Publication

POLL = 0.5
"""Seconds between two requests for progress."""
SHOWN = 10.0
"""Seconds between two lines of progress."""


class RunEnded(Exception):
    """The run is no longer there."""


def page(config: Config, state: LearnerState, request: Request, *, address: str) -> Path | None:
    """Evaluate on the live run and write the page. None, after telling why, if a separate evaluation is better."""
    why_not = obstacle(config, stored(request.run))
    if why_not:
        print(f"note: {why_not}", flush=True)
        return None
    found = evaluate(located(config), state, request, address=address, tell=partial(print, flush=True))
    return None if found is None else write(config, request, state, found)


def evaluate(
    config: Config, state: LearnerState, request: Request, *, address: str, tell: Callable[[str], None]
) -> Found | None:
    """Evaluate on the live run of `request.run`, whose cluster is at `address`; None if it is not live, or ends.

    `tell` is given sentences for the user. Raises UserError, RunError.
    """
    with joined(address, job=f"evaluation of {config.run.name}"):
        controller = live_run.controller_of(request.run)
        if controller is None:
            return None
        try:
            return asyncio.run(_evaluate(controller, config, state, request, tell))
        except RunEnded:
            tell("the run ended before the evaluation; evaluating alone")
            return None


async def _evaluate(
    controller: Any, config: Config, state: LearnerState, request: Request, tell: Callable[[str], None]
) -> Found:
    """Raises RunEnded if the run ends before."""
    name = f"{namespace(request.out)}-{secrets.token_hex(4)}"  # two commands may have chosen the same folder
    asked = EvaluationRequest(
        name=name,
        config=config,
        prompts=tuple(read_prompts(config.prompts.heldout)[: config.evaluation.prompts]),
        updates=state.updates,
        publications=await _merged(controller, config, state, request, name),
    )
    await _ask(controller.submit_evaluation, asked)
    tell(f"the run evaluates beside its updates, and for at most {config.evaluation.share:.0%} of its time besides")
    loop = asyncio.get_running_loop()
    shown = loop.time()
    try:
        while True:
            progress: RequestProgress | None = await _ask(controller.poll_evaluation, name)
            if progress is None:
                raise RunError(f"the run has forgotten the evaluation {name}")
            if progress.error is not None:
                raise progress.error
            if progress.found is not None or loop.time() - shown > SHOWN:
                tell(_counted(progress, len(asked.prompts)))
                shown = loop.time()
            if progress.found is not None:
                return progress.found
            await asyncio.sleep(POLL)
    finally:
        with suppress(RunEnded, RunError):  # a run forgets by itself what nobody asks for
            await _ask(controller.forget_evaluation, name)


def _counted(progress: RequestProgress, prompts: int) -> str:
    """``10 of 128 prompts evaluated (64 for each of 2 policies)``."""
    policies = progress.total // prompts
    each = f" ({prompts} for each of {policies} policies)" if policies > 1 else ""
    return f"{progress.done} of {progress.total} prompts evaluated{each}"


async def _merged(
    controller: Any, config: Config, state: LearnerState, request: Request, name: str
) -> dict[str, Publication]:
    # Does not affect the result: merging gives the same bits on any device.
    threads = max(1, (os.cpu_count() or 1) // 2)
    merging = config.changed({"fleet.learners": Learners(threads=threads)})
    world = RayWorld(ActorFactory(merging, request.run, ActorClasses(), scope=name))
    merger = Actor(on_this_node(Merger, "merger", name).remote(merging, 0), "merger")
    try:
        return await merged(world, merger, merging, state, request.policies, seconds=config.fleet.deadlines.update)
    except WorkerGone:
        await _ask(controller.progress)  # a run that has ended takes its cluster down
        raise


async def _ask(method: Any, *arguments: Any) -> Any:
    """The answer of the run's controller. It is asked again if it is late: each of these calls may come twice.

    Raises RunEnded if it is gone, RunError if it does not answer.
    """
    for _ in range(UNANSWERED):
        try:
            asked = method.remote(*arguments)
            return await wait.answer(asked, what="the run's controller", seconds=live_run.ANSWER_SECONDS)
        except Late as error:
            late = error
        except WorkerGone as error:
            raise RunEnded from error
    raise RunError(f"{late}, {UNANSWERED} times: its machine is very busy; evaluate again later") from late

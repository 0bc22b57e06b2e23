"""A whole run in one process, without Ray: the real controller calls the real worker classes directly.

    python benchmarks/one_process.py CONFIG… [--set KEY=VALUE …]

For campaigns with small models on a GPU: with Ray, a run of the testbed is three processes that take turns on the GPU
and leave it idle most of the time. The run folder is byte-identical to that of `solrl train`
(`tests/system/test_one_process.py`), but without report and curves. An existing run is resumed. Workers are not
replaced: any failure ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from actors.client.launch import located
from actors.controller import Controller
from actors.workers.explorer import Explorer
from actors.workers.learner_rank import LearnerRank
from actors.workers.regenerator import Regenerator
from actors.workers.selector import Selector
from actors.workers.text_encoder import TextEncoder
from actors.world import Process, Sent
from solrl_ray.config import compiled_learner
from solrl_ray.config.checks import check
from solrl_ray.config.loading import Sources, load
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError, UserError
from solrl_ray.learning.engine import free_port
from solrl_ray.learning.state import LearnerState
from solrl_ray.storage import continuation
from solrl_ray.storage.resume import check_prompts
from solrl_ray.storage.run_folder import RunFolder

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Ref:
    """A reference to a value, as a future."""

    future: asyncio.Future[Any]

    @property
    def value(self) -> Any:
        return self.future.result()


class Rank(LearnerRank):
    """The learner, with this process's references instead of Ray's."""

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", free_port()

    def _put(self, state: LearnerState) -> LearnerState:
        return state

    def _fetch(self, iteration: int, groups: list[Any], embeddings: list[Any]) -> Any:
        return [ref.value for ref in groups], {ref.value.prompt_id: ref.value for ref in embeddings}


class NoMetrics:
    """Discards all metrics."""

    def set(self, name: str, value: float, **tags: str) -> None: ...

    def add(self, name: str, value: float, **tags: str) -> None: ...

    def observe(self, name: str, value: float, **tags: str) -> None: ...


class OneProcessWorld:
    """Implements `actors.world.World`, which has the docstrings. An actor is a plain object; the event loop executes
    its calls one at a time, in the order sent."""

    node = "this process"

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._threads: dict[Any, int] = {}
        """Actor → threads it computes with, which affect the last bits. With Ray these are set per process."""

    def now(self) -> float:
        return time.monotonic()

    # Actors

    def text_encoder(self, name: str) -> TextEncoder:
        return TextEncoder(self._config)

    def selector(self, name: str) -> Selector:
        return Selector(self._folder, self._config.fleet.strict)

    def explorer(self, name: str) -> Explorer:
        return Explorer(name, self._config)

    def regenerator(self, name: str) -> Regenerator:
        return Regenerator(name, self._config)

    def learner(self, rank: int, rebuilt: int) -> Rank:
        return Rank(self._config, rank)

    def reserve_learner_bundles(self, seconds: float) -> bool:
        return True

    def process(self, actor: Any) -> Process:
        return Process()

    def kill(self, actor: Any) -> None:
        """Do nothing: the actor is freed with its last reference."""

    dismiss = kill

    def abort(self, rank: Any) -> None:
        """Do nothing: with a single rank, no other one waits for it."""

    # Calls

    def send(self, actor: Any, method: str, *arguments: Any, parts: int = 1) -> Sent:
        loop = asyncio.get_running_loop()
        sent = Sent(Ref(loop.create_future()), Ref(loop.create_future()) if parts == 2 else None)
        loop.call_soon(self._do, actor, method, arguments, sent)
        return sent

    async def answer(self, sent: Sent, *, what: str, seconds: float | None) -> Any:
        # No deadline: the loop that would enforce it is busy with the call. `campaign.py` limits the whole run.
        return await asyncio.shield(sent.answer.future)

    def put(self, value: Any) -> Ref:
        future = asyncio.get_running_loop().create_future()
        future.set_result(value)
        return Ref(future)

    def _do(self, actor: Any, method: str, arguments: Sequence[Any], sent: Sent) -> None:
        if sent.answer.future.cancelled():
            return
        torch.set_num_threads(self._threads.get(actor, torch.get_num_threads()))
        try:
            given = [each.value if isinstance(each, Ref) else each for each in arguments]
            made: Any = self.node if method == "node" else None
            if method not in ("node", "send_notes"):  # these two query Ray
                made = getattr(actor, method)(*given)
        except Exception as error:
            sent.answer.future.set_exception(error)
            sent.answer.future.exception()  # marks it as retrieved
            return
        self._threads[actor] = torch.get_num_threads()
        # Copies, as with Ray: an actor may reuse its buffers, such as a learner those of the packed weights.
        made = pickle.loads(pickle.dumps(made))
        if sent.large is not None:
            made, large = made
            sent.large.future.set_result(large)
        sent.answer.future.set_result(made)

    # Blocking work and output

    async def blocking(self, work: Callable[[], T], what: str, seconds: float) -> T:
        return work()

    def draining_nodes(self) -> frozenset[str]:
        return frozenset()

    def survey(self, config: Config) -> list[str]:
        return []

    def exporter(self, run: str) -> NoMetrics:
        return NoMetrics()

    def metrics_writers(self, folder: Path, first_iteration: int) -> list[Any]:
        return []

    def tracker(self, name: str, config: Config, folder: Path) -> Any:
        raise UserError(f"tracking.trackers has {name}, but a run in one process has no trackers")

    def write_report(self, folder: Path) -> None:
        """Do nothing: campaigns do not read reports."""


def checked(config: Config) -> Config:
    """The configuration, validated. Raises UserError for settings that one process does not support."""
    check(config)
    if config.learner.world_size != 1:
        raise UserError(f"learner.world_size is {config.learner.world_size}; a run in one process supports only 1")
    return compiled_learner.resolve_auto(config)


def train(config: Config) -> None:
    """Start or resume the run and train to its end. Raises the same errors as `solrl train`."""
    folder = RunFolder.of(config)
    resume = folder.begun
    if resume:
        was = continuation.stored(folder.path)
        config = continuation.inherit_from(config, was)
        continuation.check(config, was, folder.path, Sources())
    folder.create(config, resume=resume)
    check_prompts(folder, config)
    folder.note_start(sys.argv)
    folder.lock.release()  # the controller claims it
    path = folder.path.absolute()
    controller = Controller(located(config), path, OneProcessWorld(config, path))
    asyncio.run(controller.run())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="+", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    try:
        train(checked(load(arguments.config, arguments.set)))
    except (RunError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Players that note what they do, so that who disturbs them can choose the moment by their state."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from actors.fleet.actor_factory import ActorClasses
from actors.workers.explorer import Explorer
from actors.workers.learner_rank import LearnerRank
from actors.workers.regenerator import Regenerator
from actors.workers.selector import Selector
from actors.workers.text_encoder import TextEncoder
from tests.chaos.notes import Note


def write(path: Path, who: str, doing: str) -> None:
    """Add a line; lines of several processes do not mix, since each is one write at the file's end."""
    node = ray.get_runtime_context().get_node_id()
    note = Note(at=time.monotonic(), who=who, pid=os.getpid(), node=node, doing=doing)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, json.dumps(asdict(note)).encode() + b"\n")
    finally:
        os.close(descriptor)


UNHURRIED = "unhurried"
"""A file beside the run: while it is there, each unit takes a second more, without a core."""


def unhurried(root: str) -> None:
    if Path(root, UNHURRIED).exists():
        time.sleep(1.0)


def noted(before: str, method: Callable[..., Any], after: str) -> Any:
    """`method`, with a note before it is done and one after."""

    @functools.wraps(method)
    def noting(self: Any, *arguments: Any, **keywords: Any) -> Any:
        self._note(before)
        answer = method(self, *arguments, **keywords)
        self._note(after)
        return answer

    return noting


class NotingEncoder(TextEncoder):
    def _note(self, doing: str) -> None:
        write(Path(self._config.run.root, "notes.jsonl"), "text_encoder", doing)

    start = noted("starting", TextEncoder.start, "idle")


class NotingExplorer(Explorer):
    def _note(self, doing: str) -> None:
        write(Path(self._config.run.root, "notes.jsonl"), self._name, doing)
        if doing == "working":
            unhurried(self._config.run.root)

    start = noted("starting", Explorer.start, "started")
    load_revision = noted("loading", Explorer.load_revision, "ready")
    explore = noted("working", Explorer.explore, "answered")


class NotingRegenerator(Regenerator):
    def _note(self, doing: str) -> None:
        write(Path(self._config.run.root, "notes.jsonl"), self._name, doing)
        if doing == "working":
            unhurried(self._config.run.root)

    start = noted("starting", Regenerator.start, "started")
    load_revision = noted("loading", Regenerator.load_revision, "ready")
    regenerate = noted("working", Regenerator.regenerate, "answered")
    evaluate = noted("working", Regenerator.evaluate, "answered")


class NotingLearner(LearnerRank):
    def _note(self, doing: str) -> None:
        write(Path(self._config.run.root, "notes.jsonl"), f"learner-{self._rank}", doing)

    start = noted("starting", LearnerRank.start, "started")
    join = noted("joining", LearnerRank.join, "joined")
    load = noted("loading", LearnerRank.load, "loaded")
    update = noted("updating", LearnerRank.update, "updated")


class NotingSelector(Selector):
    def _note(self, doing: str) -> None:
        write(self._folder.path.parent / "notes.jsonl", ray.get_runtime_context().get_actor_name() or "", doing)

    open = noted("opening", Selector.open, "open")
    record = noted("recording", Selector.record, "open")
    record_group = noted("storing", Selector.record_group, "open")


CLASSES = ActorClasses(
    text_encoder=NotingEncoder,
    explorer=NotingExplorer,
    regenerator=NotingRegenerator,
    learner=NotingLearner,
    selector=NotingSelector,
)

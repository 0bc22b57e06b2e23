"""Revisions of the sampling policy: makes them from the learners' state and sends them to the pools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from actors.fleet.fleet import Fleet
from actors.training.learner_group import LearnerGroup
from actors.world import Tasks, World
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.learning.state import LearnerState
from solrl_ray.policy.digest import lora_digest
from solrl_ray.weight_sync.manifest import Policy
from solrl_ray.weight_sync.payload import Revision
from solrl_ray.weight_sync.publication import EXPLORER, REGENERATOR, Publication


@dataclass(frozen=True, slots=True)
class PublishedRevision:
    """A revision, ready to be sent."""

    publication: Publication
    digest: asyncio.Future[str]
    """`lora_digest` of its LoRA factors, computed while the revision is sent."""


class PolicyPublisher:
    newest: PublishedRevision
    """The newest revision: the current sampling policy."""
    sent_to_explorers: PublishedRevision
    """The revision last sent to explorers."""

    def __init__(
        self, config: Config, world: World, tasks: Tasks, fleet: Fleet, learners: LearnerGroup, probe: Any
    ) -> None:
        """`probe`: reference to the prompt embedding of the probe forward."""
        self._world, self._tasks, self._fleet = world, tasks, fleet
        self._learners, self._probe = learners, probe
        self._mode = config.publish.mode
        self._seconds = config.fleet.deadlines.publish
        self._regenerated: PublishedRevision | None = None
        """The revision last sent to regenerators; None if they hold a policy for evaluation."""
        self._turn = asyncio.Lock()
        """Held while regenerators must keep their policy: during an evaluation, an update may need groups again."""

    async def make(self, updates: int) -> None:
        """Make revision `updates`."""
        self._learners.packs = self._fleet.needs_packed
        revision = await self._learners.revision("old")
        self._adopt(revision, updates)

    async def make_updated(self, updates: int) -> LearnerState:
        """`make` right after an update; returns the learner state of the revision."""
        self._learners.packs = self._fleet.needs_packed
        state, revision = await self._learners.updated(self._fleet.prepare)
        self._adopt(revision, updates)
        return state

    def _adopt(self, revision: Revision, updates: int) -> None:
        if revision.manifest.revision != updates:
            raise RunError(f"the learners hold {revision.name}, not revision {updates}; resume the run")
        what = f"taking the digest of {revision.name}"
        work = self._world.blocking(lambda: lora_digest(revision.factors), what, self._seconds)
        digest = self._tasks.start(work, what)
        self.newest = PublishedRevision(self._publication(revision), digest)

    async def to_explorers(self) -> None:
        """Send the newest revision to the explorers."""
        self.sent_to_explorers = self.newest
        await self._fleet.publish(EXPLORER, self.newest.publication, self._probe)

    async def to_regenerators(self) -> None:
        """Send the newest revision to the regenerators, unless they have it."""
        async with self.regenerating():
            pass

    @asynccontextmanager
    async def regenerating(self, *, after: asyncio.Event | None = None) -> AsyncIterator[None]:
        """Context in which regenerators hold the newest revision and no evaluation runs.

        `after`: event to wait for first.
        """
        if after is not None:
            await after.wait()
        async with self._turn:
            if self._regenerated is not self.newest:
                self._regenerated = self.newest
                await self._fleet.publish(REGENERATOR, self.newest.publication, self._probe)
            yield

    async def policy(self, policy: Policy) -> Publication:
        """A publication of another policy of the learners (``ema``, ``base``), for evaluation."""
        return self._publication(await self._learners.revision(policy))

    def _publication(self, revision: Revision) -> Publication:
        return Publication(revision=revision, mode=self._mode)

    @asynccontextmanager
    async def evaluating(self, publication: Publication) -> AsyncIterator[None]:
        """Context in which regenerators hold `publication`, for evaluation. The next `regenerating` sends them the
        newest revision again.
        """
        async with self._turn:
            self._regenerated = None
            await self._fleet.publish(REGENERATOR, publication, self._probe)
            yield

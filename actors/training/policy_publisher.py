"""The revisions of the sampling policy: made of what the learners hold, sent to both pools, kept in the run folder.

Making and storing are done aside (`actors.cluster.background`), sending by the controller's main thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actors.fleet.fleet import Fleet
from actors.training.learner_group import LearnerGroup
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.errors import RunError
from solrl_ray.policy.digest import lora_digest
from solrl_ray.rollout.fallback import FallbackLadder
from solrl_ray.storage.run_folder import RunFolder
from solrl_ray.weight_sync.manifest import Policy
from solrl_ray.weight_sync.publication import EXPLORER, REGENERATOR, Publication, Publications
from solrl_ray.weight_sync.store import RevisionStore

REVISIONS_KEPT = 2


@dataclass(frozen=True, slots=True)
class PublishedRevision:
    """A revision that is ready to be sent."""

    publication: Publication
    digest: str
    """`lora_digest` of its factors."""
    fallback_level: int
    """Of the fallback ladder, whose explorers it is packed for."""


class PolicyPublisher:
    newest: PublishedRevision
    """Made last; the sampling policy as it is now."""
    explored: PublishedRevision
    """What the explorers were sent last."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        fleet: Fleet,
        learners: LearnerGroup,
        ladder: FallbackLadder,
        probe: Any,
    ) -> None:
        """`probe`: reference of the prompt embedding of the probe forward."""
        self._fleet = fleet
        self._learners = learners
        self._ladder = ladder
        self._probe = probe
        self._store = RevisionStore(folder.path / "revisions")
        self._publications = Publications(config.publish)
        self._regenerated: PublishedRevision | None = None
        """What the regenerators were sent last, if it is none that is only evaluated."""

    def make(self, updates: int, fallback_level: int) -> None:
        """Revision `updates`, packed for the explorers of a level of the fallback ladder."""
        self._learners.tier = pool_sampling(self._ladder.config(fallback_level)).tier
        revision = self._learners.revision("old")
        if revision.manifest.revision != updates:
            raise RunError(f"the learners hold {revision.name}, not revision {updates}; resume the run")
        self.newest = PublishedRevision(
            self._publications.publish(revision), lora_digest(revision.factors), fallback_level
        )

    def store(self) -> None:
        """Keep the newest revision in the run folder."""
        self._store.save(self.newest.publication)
        self._store.prune(keep=REVISIONS_KEPT)

    def explore(self) -> None:
        """Send the explorers the newest revision."""
        self.explored = self.newest
        self._fleet.explore_as(self._ladder.config(self.newest.fallback_level))
        self._fleet.publish(EXPLORER, self.newest.publication, self._probe)

    def regenerate(self) -> None:
        """Send the regenerators the newest revision; nothing to do if they were."""
        if self._regenerated is not self.newest:
            self._regenerated = self.newest
            self._fleet.publish(REGENERATOR, self.newest.publication, self._probe)

    def policy(self, policy: Policy) -> Publication:
        """Another policy of the learners', to be evaluated."""
        return self._publications.publish(self._learners.revision(policy))

    def evaluate(self, publication: Publication) -> None:
        """Send the regenerators a policy that is only evaluated; before they go on they need `regenerate`."""
        self._regenerated = None
        self._fleet.publish(REGENERATOR, publication, self._probe)

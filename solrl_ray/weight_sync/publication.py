"""What part of a revision each receiver gets, and when as a delta.

    revision 0   1   2   …   n   n+1
             S ◄ D ◄ D   …   S ◄ D          S snapshot, D delta against the one before

A worker that lacks the parent of a delta, or cannot use it, gets the snapshot instead, which is always available.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from solrl_ray.config.schema import Publish
from solrl_ray.weight_sync.manifest import module_of
from solrl_ray.weight_sync.payload import Revision, deltas_between, encode

EXPLORER = "explorer"
REGENERATOR = "regenerator"
CARD = "card"
"""Any worker on the card of a learner rank, which has the factors already."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Publication:
    """A revision to be sent."""

    revision: Revision
    mode: str
    """`Publish.mode`."""
    deltas: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensor name → zstd frame; empty for a snapshot."""
    parent: str = ""
    """`Manifest.packed_digest` of the deltas' parent."""

    @property
    def name(self) -> str:
        return self.revision.name

    @property
    def is_packed(self) -> bool:
        """Whether an explorer without a base can use it: it has the packed weights, if there are any."""
        return self.mode != "packed" or bool(self.revision.packed_names) or not self.revision.manifest.formats

    @property
    def kind(self) -> str:
        """How explorers get it: ``snapshot``, ``delta`` or ``factors``."""
        if self.mode != "packed" or not self.revision.packed_names:
            return "factors"
        return "delta" if self.deltas else "snapshot"

    def has_whole(self, role: str) -> bool:
        """Whether the full payload of a role differs from the one that its workers get first."""
        in_lora = self.mode == "lora" and bool(self.revision.packed_names)
        return role == CARD or (role == EXPLORER and (bool(self.deltas) or in_lora))

    def payload(self, role: str, *, full: bool = False) -> bytes:
        """The payload for workers of a role; `full` does not depend on what they hold.

        Regenerators merge the factors themselves. Explorers get packed weights, and factors only for the modules that
        they do not quantise; with mode ``lora`` or ``branch``, and where nothing was packed, they get factors, and
        packed weights only if their own came out differently. On a learner's card the manifest is enough, unless that
        learner holds another policy.
        """
        revision = self.revision
        if role == CARD:
            return encode(revision.manifest, revision.factors if full else {})
        in_factors = self.mode == "branch" or (self.mode == "lora" and not full) or not revision.packed_names
        if role == REGENERATOR or in_factors:
            return encode(revision.manifest, revision.factors)
        merged = {n: t for n, t in revision.factors.items() if module_of(n) not in revision.manifest.formats}
        if full:
            return encode(revision.manifest, merged | revision.packed)
        return encode(revision.manifest, merged | self.whole(), self.deltas, parent=self.parent)

    def complete(self) -> None:
        """Apply the deltas that the revision came as. It may take a second, so not while a worker waits for its
        payload.
        """
        for name in self.revision.packed_names:
            self.revision.tensors[name]

    def whole(self) -> dict[str, torch.Tensor]:
        """The packed tensors that are not sent as deltas."""
        revision = self.revision
        return {name: revision.tensors[name] for name in revision.packed_names if name not in self.deltas}


class Publications:
    """Makes publications in order and keeps the newest state of the sampling policy."""

    def __init__(self, config: Publish) -> None:
        self._config = config
        self._newest: Revision | None = None

    def parent(self, revision: int) -> Revision | None:
        """The state before that of revision number `revision`, if available: learner ranks then send only differences,
        also for a snapshot.
        """
        newest = self._newest
        return None if newest is None or newest.manifest.revision != revision - 1 else newest

    def publish(self, revision: Revision) -> Publication:
        """A delta if `revision` follows the newest state, in its formats, and no snapshot is due; else a snapshot.

        The deltas are those that it came as, or are made here.
        """
        mode, manifest = self._config.mode, revision.manifest
        if manifest.policy != "old":
            return Publication(revision=revision, mode=mode)
        newest, self._newest = self.parent(manifest.revision), revision
        due = manifest.revision % self._config.snapshot_every == 0
        if due or newest is None or newest.manifest.formats != manifest.formats:
            return Publication(revision=revision, mode=mode)
        deltas = revision.deltas or deltas_between(revision, newest)
        parent = newest.manifest.packed_digest() if deltas else ""
        return Publication(revision=revision, mode=mode, deltas=deltas, parent=parent)

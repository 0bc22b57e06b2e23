"""The part of a revision that each receiver gets: the manifest only, LoRA factors, or packed weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from solrl_ray.weight_sync.manifest import module_of
from solrl_ray.weight_sync.payload import Payload, Revision

EXPLORER = "explorer"
REGENERATOR = "regenerator"
CARD = "card"
"""Role of every worker on the GPU of a learner rank, which already has the factors."""

Content = Literal["manifest", "factors", "packed"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Publication:
    """A revision, and which of its tensors each role is sent."""

    revision: Revision
    mode: str
    """`Publish.mode`."""

    @property
    def name(self) -> str:
        return self.revision.name

    @property
    def is_usable(self) -> bool:
        """Whether an explorer that does not share a learner's GPU can use the publication: it merges factors itself, or
        nothing is quantised, or the packed weights are included.
        """
        manifest = self.revision.manifest
        return self.mode == "lora" or not manifest.formats or bool(self.revision.packed)

    def content(self, role: str, *, full: bool = False) -> Content:
        """The content that workers of a role are sent.

        Regenerators merge the factors themselves. So do explorers with mode ``lora``, or if nothing was packed. Other
        explorers get packed weights, and factors only for the modules that they do not quantise. Workers on a learner's
        GPU need only the manifest, unless that learner holds another policy (`full`).
        """
        if role == CARD:
            return "factors" if full else "manifest"
        return "packed" if role == EXPLORER and self.mode == "packed" and self.revision.packed else "factors"

    def payload_of(self, content: Content) -> Payload:
        """The payload with this content."""
        revision = self.revision
        tensors = revision.factors if content != "manifest" else {}
        if content == "packed":
            formats = revision.manifest.formats
            tensors = {name: t for name, t in tensors.items() if module_of(name) not in formats} | revision.packed
        return Payload(manifest=revision.manifest, tensors=tensors)

    def payload(self, role: str, *, full: bool = False) -> Payload:
        """The payload for workers of a role."""
        return self.payload_of(self.content(role, full=full))

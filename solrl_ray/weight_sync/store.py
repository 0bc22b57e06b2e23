"""Revisions on disk: ``revision-000020/`` with ``factors.safetensors``, ``packed.safetensors``, ``manifest.json``.

The first two are payloads, so ``packed.safetensors`` holds a snapshot or deltas against the revision before, which is
kept as long as it is needed. It holds nothing if no explorer needed packed weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from solrl_ray.common.files import remove, replace_folder
from solrl_ray.errors import RunError
from solrl_ray.weight_sync import container, payload
from solrl_ray.weight_sync.manifest import Manifest, is_factor
from solrl_ray.weight_sync.payload import Payload, Revision
from solrl_ray.weight_sync.publication import Publication

_FACTORS, _PACKED, _MANIFEST = "factors.safetensors", "packed.safetensors", "manifest.json"
_PREFIX = "revision-"


class RevisionStore:
    """The revisions of one run. A folder gets its name when all its files are on the disk; others are ignored."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, publication: Publication) -> Path:
        """Writes a revision, packed weights as snapshot or delta as they are published.

        Does nothing if the same revision is stored, unless the stored one is damaged, not packed, or packed for
        explorers of another tier (a run resumed elsewhere): then it is written again.

        Raises:
            RunError: another revision of this name is stored, because a revision never changes; or the one that its
                deltas are against is missing.
        """
        revision = publication.revision
        folder, manifest = self._folder / revision.name, revision.manifest
        stored = self._stored(manifest.revision)
        if stored is not None and stored.manifest == manifest:
            if stored.packed_names or not revision.packed_names:
                return folder
        elif stored is not None and (stored.manifest.formats == manifest.formats or not _same_policy(stored, revision)):
            raise RunError(f"{folder} holds a different {revision.name}: a revision never changes")
        if publication.deltas and manifest.parent not in self.revisions():
            raise RunError(f"{revision.name} is a delta, but {self._folder} does not hold revision {manifest.parent}")
        contents: dict[str, Sequence[bytes | memoryview]] = {
            _FACTORS: payload.pieces(manifest, revision.factors),
            _PACKED: payload.pieces(manifest, publication.whole(), publication.deltas, parent=publication.parent),
            _MANIFEST: [manifest.to_json().encode()],
        }
        replace_folder(folder, contents)
        return folder

    def revisions(self) -> list[int]:
        """Numbers of the complete revisions of the sampling policy, rising."""
        numbers = [
            int(manifest.parent.name.removeprefix(_PREFIX))
            for manifest in self._folder.glob(f"{_PREFIX}*/{_MANIFEST}")
            if manifest.parent.name.removeprefix(_PREFIX).isdigit()
        ]
        return sorted(numbers)

    def load(self, revision: int) -> Revision:
        """Reads a revision from its snapshot on, verifying every checksum.

        Raises:
            RunError: it or one that it needs is missing, or a file or tensor of it is damaged, naming that.
        """
        chain = self._chain(revision)
        held: Revision | None = None
        for number in chain:
            held = self._apply(number, held)
        assert held is not None
        return held

    def prune(self, keep: int) -> None:
        """Removes all but the newest `keep` revisions and those that their deltas need.

        The manifest goes first, so that a half-removed one is ignored.
        """
        numbers = self.revisions()
        kept = {needed for number in numbers[-max(keep, 1) :] for needed in self._needed(number)}
        for number in numbers:
            if number not in kept:
                folder = self._path(number)
                (folder / _MANIFEST).unlink()
                remove(folder)

    def _stored(self, revision: int) -> Revision | None:
        """A stored, undamaged revision."""
        try:
            return self.load(revision) if (self._path(revision) / _MANIFEST).is_file() else None
        except RunError:
            return None

    def _needed(self, revision: int) -> list[int]:
        """The stored revisions needed to read this one; for a damaged one only itself."""
        try:
            return self._chain(revision)
        except RunError:
            return [revision]

    def _chain(self, revision: int) -> list[int]:
        """The revisions to read for this one: a snapshot, then deltas, itself last."""
        chain = [revision]
        while True:
            folder = self._path(chain[0])
            if not (folder / _MANIFEST).is_file():
                raise RunError(f"revision {chain[0]} is not in {self._folder}, which holds {self.revisions()}")
            try:
                is_delta = "parent" in container.read_metadata(folder / _PACKED)
            except (RunError, FileNotFoundError) as error:
                raise RunError(f"{folder / _PACKED} is damaged: {error}") from error
            if not is_delta:
                return chain
            chain.insert(0, chain[0] - 1)

    def _apply(self, number: int, parent: Revision | None) -> Revision:
        """A stored revision, given the one before if it is a delta."""
        factors, packed = self._read(number, _FACTORS), self._read(number, _PACKED)
        manifest = packed.manifest
        if packed.parent and (parent is None or packed.parent != parent.manifest.packed_digest()):
            raise RunError(f"the delta in {self._path(number)} was made against another revision {number - 1}")
        weights = payload.packed_from(packed, parent.packed if parent else {}, manifest.formats)
        tensors = factors.tensors | weights
        wanted = manifest.tensors.keys() if weights else {name for name in manifest.tensors if is_factor(name)}
        if factors.manifest != manifest or tensors.keys() != wanted:
            raise RunError(f"the files in {self._path(number)} are not those of one revision")
        return Revision(manifest=manifest, tensors=dict(sorted(tensors.items())))

    def _read(self, number: int, name: str) -> Payload:
        path = self._path(number) / name
        try:
            read = payload.read(path.read_bytes())
            stated = Manifest.from_json((self._path(number) / _MANIFEST).read_bytes())
        except (RunError, FileNotFoundError) as error:
            raise RunError(f"{path} is damaged: {error}") from error
        if read.manifest != stated:
            raise RunError(f"{path} is of another revision than the manifest beside it")
        return read

    def _path(self, revision: int) -> Path:
        return self._folder / f"{_PREFIX}{revision:06d}"


def _same_policy(one: Revision, other: Revision) -> bool:
    """Whether two revisions have the same factors, bit for bit."""
    stamps = [{name: revision.manifest.tensors[name] for name in revision.factors} for revision in (one, other)]
    return stamps[0] == stamps[1]

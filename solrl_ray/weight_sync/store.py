"""Revisions on disk: ``revision-000020.safetensors``, the payload of LoRA factors with the manifest.

Packed weights are not stored. They follow from the base and the factors, and the manifest has their checksums.
"""

from __future__ import annotations

from pathlib import Path

from solrl_ray.common.files import replace_file
from solrl_ray.errors import RunError
from solrl_ray.weight_sync import payload
from solrl_ray.weight_sync.manifest import is_factor
from solrl_ray.weight_sync.payload import Revision

_PREFIX, _SUFFIX = "revision-", ".safetensors"


class RevisionStore:
    """The revisions of one run. A file gets its name when it is on the disk; others are ignored."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, revision: Revision) -> Path:
        """Writes a revision.

        Does nothing if it is stored, unless the stored one is damaged, or states the checksums of explorers of another
        tier (a run resumed elsewhere): then it is written again.

        Raises:
            RunError: another revision of this name is stored, because a revision never changes.
        """
        file, manifest = self._path(revision.manifest.revision), revision.manifest
        stored = self._undamaged(manifest.revision)
        if stored is not None:
            if stored.manifest == manifest:
                return file
            if stored.manifest.formats == manifest.formats or not _same_policy(stored, revision):
                raise RunError(f"{file} holds a different {revision.name}: a revision never changes")
        replace_file(file, payload.encode(manifest, revision.factors))
        return file

    def revisions(self) -> list[int]:
        """Numbers of the revisions of the sampling policy, rising."""
        names = [file.name.removeprefix(_PREFIX).removesuffix(_SUFFIX) for file in self._folder.glob(f"{_PREFIX}*")]
        return sorted(int(name) for name in names if name.isdigit() and self._path(int(name)).is_file())

    def load(self, revision: int) -> Revision:
        """The factors of a revision, verified.

        Raises:
            RunError: it is missing or damaged, naming the first bad tensor.
        """
        file = self._path(revision)
        try:
            read = payload.read(file.read_bytes())
        except FileNotFoundError as error:
            raise RunError(f"revision {revision} is not in {self._folder}, which holds {self.revisions()}") from error
        except RunError as error:
            raise RunError(f"{file} is damaged: {error}") from error
        wanted = {name for name in read.manifest.tensors if is_factor(name)}
        if read.manifest.revision != revision or read.tensors.keys() != wanted:
            raise RunError(f"{file} is damaged: it does not hold the factors of revision {revision}")
        return Revision(manifest=read.manifest, tensors=read.tensors)

    def prune(self, keep: int) -> None:
        """Removes all but the newest `keep` revisions."""
        for number in self.revisions()[: -max(keep, 1)]:
            self._path(number).unlink()

    def _undamaged(self, revision: int) -> Revision | None:
        """A stored revision; None if it is missing, damaged, or the disk does not give it."""
        try:
            return self.load(revision)
        except (RunError, OSError):
            return None

    def _path(self, revision: int) -> Path:
        return self._folder / f"{_PREFIX}{revision:06d}{_SUFFIX}"


def _same_policy(one: Revision, other: Revision) -> bool:
    """Whether two revisions have the same factors, bit for bit."""
    stamps = [{name: revision.manifest.tensors[name] for name in revision.factors} for revision in (one, other)]
    return stamps[0] == stamps[1]

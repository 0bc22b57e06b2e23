"""Revisions on disk: ``revision-000020/`` with ``factors.safetensors``, ``packed.safetensors``,
``manifest.json``."""

from __future__ import annotations

import shutil
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError

from solrl_ray.errors import RunError
from solrl_ray.files import replace_folder
from solrl_ray.revisions.payload import Revision

_FACTORS, _PACKED, _MANIFEST = "factors.safetensors", "packed.safetensors", "manifest.json"
_PREFIX = "revision-"


class RevisionStore:
    """The revisions of one run. A folder gets its name when all its files are on the disk; others are
    ignored."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, revision: Revision) -> Path:
        """Writes a revision; the same one again is nothing to do.

        Raises:
            RunError: another revision of this name is stored, because a revision never changes.
        """
        folder = self._folder / revision.name
        manifest = revision.manifest()
        if (folder / _MANIFEST).is_file():
            if (folder / _MANIFEST).read_text() != manifest:
                raise RunError(f"{folder} holds a different {revision.name}: a revision never changes")
            return folder
        contents = {
            _FACTORS: safetensors.torch.save(revision.factor_tensors()),
            _PACKED: safetensors.torch.save(revision.packed_tensors()),
            _MANIFEST: manifest.encode(),
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

    def latest(self) -> int | None:
        return max(self.revisions(), default=None)

    def load(self, revision: int) -> Revision:
        """Reads a revision, checking every checksum.

        Raises:
            RunError: it is not stored, or a file or tensor of it is damaged, naming that.
        """
        folder = self._folder / f"{_PREFIX}{revision:06d}"
        if not (folder / _MANIFEST).is_file():
            raise RunError(f"revision {revision} is not in {self._folder}, which holds {self.revisions()}")
        tensors = {}
        for name in (_FACTORS, _PACKED):
            try:
                tensors.update(safetensors.torch.load_file(folder / name))
            except (SafetensorError, FileNotFoundError) as error:
                raise RunError(f"{folder / name} is damaged: {error}") from error
        return Revision.from_parts((folder / _MANIFEST).read_text(), tensors)

    def prune(self, keep: int) -> None:
        """Removes all but the newest `keep` revisions; the manifest goes first, so a half-removed one is
        ignored."""
        for number in self.revisions()[: -max(keep, 1)]:
            folder = self._folder / f"{_PREFIX}{number:06d}"
            (folder / _MANIFEST).unlink()
            shutil.rmtree(folder)

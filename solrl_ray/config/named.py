"""Configurations that come with this package, found by name: ``flux1_dev`` is ``configs/models/flux1_dev.yaml``.

The folder ``configs`` is at the top of the repository; a wheel has it inside the package.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

import solrl_ray
from solrl_ray.config.problems import listed
from solrl_ray.errors import UserError

RUNS = "runs"
"""Folder of whole runs, which include the parts of all other kinds."""
ORDER = (RUNS, "models", "scopes", "strategies", "methods", "rewards", "evaluations", "clusters")
"""Kinds in the order in which they are merged: what follows wins."""


def folder() -> Path:
    """Where they are."""
    package = Path(solrl_ray.__file__).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.with_name("configs")


def resolve(given: Sequence[Path], *, several: bool = False) -> list[Path]:
    """Names and files of a command line as files, in the order in which they are merged.

    A name is a word without a slash and without an ending, if there is no such file. Names come first, by their kinds,
    in whatever order they were given; files come after them, in theirs. So a file of the user's wins over every name.

    Args:
        several: they are not merged: several may be of a kind, and all stay in the order in which they were given.

    Raises `UserError`: no configuration of that name, or two of a kind that replace each other.
    """
    there = {path.stem: path for path in sorted(folder().glob("**/*.yaml"))}
    if several:
        return list(dict.fromkeys(_found(str(path), there) if _is_name(path) else path for path in given))
    found = [_found(str(path), there) for path in given if _is_name(path)]
    for kind in ORDER:
        same = [path.stem for path in found if kind_of(path) == kind]
        if len(set(same)) > 1:
            raise UserError(f"{listed(same)} are all of {kind}, of which a run has one; name one of them.")
    found = sorted(dict.fromkeys(found), key=lambda path: ORDER.index(kind_of(path)))
    return found + [path for path in given if not _is_name(path)]


def _found(name: str, there: Mapping[str, Path]) -> Path:
    if name not in there:
        near = difflib.get_close_matches(name, there, n=1, cutoff=0.5)
        meant = f"did you mean {near[0]}?" if near else "`solrl list` shows them."
        raise UserError(f"There is no configuration {name}, and no file of that name; {meant}")
    return there[name]


def kind_of(path: Path) -> str:
    """Of one of this package's."""
    return path.parent.name if path.parent.name in ORDER else RUNS


def as_argument(path: Path) -> str | None:
    """How a command on another machine names one of this package's; None if it is none."""
    return path.stem if path.resolve().is_relative_to(folder().resolve()) else None


def _is_name(path: Path) -> bool:
    return len(path.parts) == 1 and not path.suffix and str(path) not in (".", "..") and not path.is_file()

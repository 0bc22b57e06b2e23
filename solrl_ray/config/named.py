"""Finds this package's configurations by name: ``flux1_dev`` is ``configs/models/flux1_dev.yaml``.

The folder ``configs`` is at the top of the repository; a wheel has it inside the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import solrl_ray
from solrl_ray.common.files import utf8_text
from solrl_ray.config import yaml_text
from solrl_ray.config.problems import listed, nearest
from solrl_ray.errors import UserError

RUNS = "runs"
"""Folder of whole runs, which include parts of all other kinds."""
ORDER = (RUNS, "models", "scopes", "strategies", "methods", "rewards", "evaluations", "clusters")
"""Kinds in the order of merging: later ones win."""


def folder() -> Path:
    package = Path(solrl_ray.__file__).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.with_name("configs")


def resolve(given: Sequence[Path], *, several: bool = False) -> list[Path]:
    """Names and files of a command line as files, in the order of merging.

    A name is a word without slash and ending, unless such a file exists. Names come first, sorted by kind; then files,
    in the given order. So a user's file wins over every name.

    `several`: they are not merged: a kind may have several, and all stay in the given order.

    Raises `UserError`: no configuration of that name, two of a kind that replace each other, or one that another one
    replaces by what it includes.
    """
    there = {path.stem: path for path in sorted(folder().glob("**/*.yaml"))}
    if several:
        return list(dict.fromkeys(_found(str(path), there) if _is_name(path) else path for path in given))
    found = [_found(str(path), there) for path in given if _is_name(path)]
    for kind in ORDER:
        same = list(dict.fromkeys(path.stem for path in found if kind_of(path) == kind))
        if len(same) > 1:
            what = f"whole {kind}" if kind == RUNS else kind
            mixture = ", or list several in one file of your own (docs/guides/rewards.md, Mixtures)"
            more = mixture * (kind == "rewards")
            raise UserError(f"{listed(same)} are {what}, of which a run has one; name one of them{more}.")
    found = sorted(dict.fromkeys(found), key=lambda path: ORDER.index(kind_of(path)))
    for at, path in enumerate(found):
        _refuse_replaced(path, found[:at])
    return found + [path for path in given if not _is_name(path)]


def _found(name: str, there: Mapping[str, Path]) -> Path:
    if name not in there and (what := as_folder(Path(name))):
        raise UserError(f"The configuration {name} {what}.")
    if name not in there:
        near = nearest(name, there, cutoff=0.5)
        meant = f"did you mean {near}?" if near else "`solrl list` shows them."
        raise UserError(f"There is no configuration {name}, and no file of that name; {meant}")
    return there[name]


def as_folder(path: Path) -> str:
    """What a folder is that was named as a configuration: ``is a folder``; empty if there is none."""
    if not (path / "config.yaml").is_file():
        return "is a folder" if path.is_dir() else ""
    return f"is a folder; `solrl train --resume {path}` goes on with its run, whose configuration is config.yaml there"


def _refuse_replaced(path: Path, earlier: Sequence[Path]) -> None:
    """Raise UserError if a file that `path` includes would replace an earlier one of its kind."""
    names = (yaml_text.parse(utf8_text(path, str(path)), str(path)) or {}).get("include", [])
    included = [(path.parent / name).resolve() for name in ([names] if isinstance(names, str) else names)]
    for part in included:
        for before in earlier:
            if kind_of(before) == kind_of(part) and before.stem != part.stem:
                instead = listed([before.stem, *(other.stem for other in included if other != part)])
                raise UserError(
                    f"{path.stem} includes {part.stem}, which would replace {before.stem}: both are {kind_of(part)}, "
                    f"and a run has one; name {instead} instead, or leave out {before.stem}."
                )


def kind_of(path: Path) -> str:
    """The kind of one of this package's."""
    return path.parent.name if path.parent.name in ORDER else RUNS


def as_argument(path: Path) -> str | None:
    """The argument for one of this package's on another machine; None for other files."""
    return path.stem if path.resolve().is_relative_to(folder().resolve()) else None


def _is_name(path: Path) -> bool:
    return len(path.parts) == 1 and not path.suffix and str(path) not in (".", "..") and not path.is_file()

"""Finds this package's configurations by name: ``flux1_dev`` is ``configs/models/flux1_dev.yaml``.

The folder ``configs`` is at the top of the repository; in a wheel it is inside the package.
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
"""Folder of whole runs, which include presets of all other kinds."""
ORDER = (RUNS, "models", "scopes", "strategies", "methods", "rewards", "evaluations", "clusters")
"""Kinds of presets in merge order: later ones win."""


def folder() -> Path:
    package = Path(solrl_ray.__file__).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.with_name("configs")


def resolve(given: Sequence[Path], *, several: bool = False) -> list[Path]:
    """Resolve the names and files of a command line to files, in merge order.

    A name is a word without slash and suffix, unless a file with that name exists. Presets come first, sorted by kind,
    then files in the given order, so a user's file wins over every preset.

    `several`: The files are not merged; a kind may have several, and all stay in the given order.

    Raises `UserError`: No preset has this name, two presets are of the same kind, or a preset includes a file that
    replaces another one.
    """
    known = {path.stem: path for path in sorted(folder().glob("**/*.yaml"))}
    if several:
        return list(dict.fromkeys(_preset(str(path), known) if _is_name(path) else path for path in given))
    presets = [_preset(str(path), known) for path in given if _is_name(path)]
    for kind in ORDER:
        same = list(dict.fromkeys(path.stem for path in presets if kind_of(path) == kind))
        if len(same) > 1:
            what = f"whole {kind}" if kind == RUNS else kind
            mixture = ", or list several in one YAML file (docs/guides/rewards.md, Mixtures)"
            more = mixture * (kind == "rewards")
            raise UserError(f"{listed(same)} are {what}, of which a run has one; name one of them{more}.")
    presets = sorted(dict.fromkeys(presets), key=lambda path: ORDER.index(kind_of(path)))
    for position, path in enumerate(presets):
        _refuse_replaced(path, presets[:position])
    return presets + [path for path in given if not _is_name(path)]


def _preset(name: str, known: Mapping[str, Path]) -> Path:
    if name not in known and (what := as_folder(Path(name))):
        raise UserError(f"The configuration {name} {what}.")
    if name not in known:
        near = nearest(name, known, cutoff=0.5)
        meant = f"did you mean {near}?" if near else "`solrl list` shows the presets."
        raise UserError(f"There is no configuration {name}, and no file of that name; {meant}")
    return known[name]


def as_folder(path: Path) -> str:
    """Error text for a folder named as a configuration: ``is a folder …``; empty if `path` is no folder."""
    if not (path / "config.yaml").is_file():
        return "is a folder" if path.is_dir() else ""
    return f"is a folder; `solrl train --resume {path}` resumes its run, whose configuration is config.yaml in it"


def _refuse_replaced(path: Path, earlier: Sequence[Path]) -> None:
    """Raise UserError if a file included by `path` would replace an earlier preset of its kind."""
    names = (yaml_text.parse(utf8_text(path, str(path)), str(path)) or {}).get("include", [])
    included = [(path.parent / name).resolve() for name in ([names] if isinstance(names, str) else names)]
    for preset in included:
        for before in earlier:
            if kind_of(before) == kind_of(preset) and before.stem != preset.stem:
                instead = listed([before.stem, *(other.stem for other in included if other != preset)])
                raise UserError(
                    f"{path.stem} includes {preset.stem}, which would replace {before.stem}: both are "
                    f"{kind_of(preset)}, and a run has one; name {instead} instead, or leave out {before.stem}."
                )


def kind_of(path: Path) -> str:
    """The kind of a preset: its folder's name."""
    return path.parent.name if path.parent.name in ORDER else RUNS


def as_argument(path: Path) -> str | None:
    """The name of a preset, which is a valid argument on any machine; None for other files."""
    return path.stem if path.resolve().is_relative_to(folder().resolve()) else None


def _is_name(path: Path) -> bool:
    return len(path.parts) == 1 and not path.suffix and str(path) not in (".", "..") and not path.is_file()

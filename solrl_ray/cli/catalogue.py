"""``solrl list``: the presets (models, strategies, methods, rewards, clusters) and their checkpoints."""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from solrl_ray.config import named
from solrl_ray.config.loading import INCLUDE, read_file
from solrl_ray.models import paths

MODELS, CLUSTERS = "models", "clusters"
KINDS = (MODELS, "strategies", "methods", "rewards")
"""Kinds of presets of which a run has exactly one, in merge order: later ones win."""
WORDS = {
    "scopes": " (optional: layers that explorers quantise, instead of the model preset's choice)",
    CLUSTERS: " (without one everything runs on CPUs, which is enough for the demo's model)",
    named.RUNS: " (complete runs, with a preset of each kind)",
}
EXAMPLE = "one_gpu"
"""Cluster preset in the example command of `table`."""
PROMPTS = ("prompts.train=TRAIN.txt", "prompts.heldout=HELDOUT.txt")
"""Settings that no preset contains."""
WIDTH, INDENT = 110, " " * 6
_DOWNLOAD = "hf download "


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    path: Path
    title: str
    """First sentence of the comment at the top of the file."""
    downloads: tuple[str, ...]
    """Commands that download its checkpoints: from the file's comment, or the whole repository of a model."""
    checkpoints: tuple[str, ...]
    """Checkpoint folders and Hugging Face ids in the file."""
    whole: bool
    """Whether the file includes presets of other kinds, such as a strategy together with a method."""


def read() -> dict[str, tuple[CatalogueEntry, ...]]:
    """The presets of this package by kind, sorted by name."""
    folder = named.folder()
    kinds = (*KINDS, "scopes", "evaluations", CLUSTERS, named.RUNS)
    entries = {kind: tuple(_entry(kind, path) for path in sorted((folder / kind).glob("*.yaml"))) for kind in kinds}
    entries[named.RUNS] += (_entry(named.RUNS, folder / "demo.yaml"),)
    return entries


def table() -> str:
    """The output of `solrl list`: the presets, their checkpoints, and an example of composing them."""
    presets = read()
    lines: list[str] = []
    for kind, entries in presets.items():
        lines.append(kind + WORDS.get(kind, ""))
        for entry in entries:
            alone = entry.whole and kind in KINDS
            title = f"{entry.title} (includes a strategy: name it without one)" if alone else entry.title
            lines.append(f"  {entry.path.stem}")
            lines += textwrap.wrap(title, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
            lines += [f"{INDENT}{name}" for name in entry.checkpoints]
            lines += [f"{INDENT}  {command}" for command in entry.downloads]
        lines.append("")
    example = [next(entry.path.stem for entry in presets[kind] if not entry.whole) for kind in KINDS]
    lines.append("Name one preset of each kind, in any order, then your YAML files:")
    lines.append(f"  solrl train {' '.join([*example, EXAMPLE])} \\")
    lines.append(f"    {' '.join(f'--set {setting}' for setting in PROMPTS)}")
    return "\n".join(lines)


def as_json() -> str:
    """The output of `solrl list --json`: kind → its presets."""
    fields = ("title", "checkpoints", "downloads")
    found = {
        kind: [{"name": part.path.stem} | {name: getattr(part, name) for name in fields} for part in parts]
        for kind, parts in read().items()
    }
    return json.dumps(found, indent=1, ensure_ascii=False)


def _entry(kind: str, path: Path) -> CatalogueEntry:
    values = read_file(path)
    included = values.get(INCLUDE, [])  # a preset may extend another preset of the same kind
    entries = [values.get("model"), *(values.get("rewards") or [])]
    checkpoints = [entry["path"] for entry in entries if isinstance(entry, dict) and entry.get("path")]
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = [line.lstrip("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]
    text = " ".join(line for line in comment if not line.startswith(_DOWNLOAD))
    downloads = tuple(line for line in comment if line.startswith(_DOWNLOAD))
    if kind == MODELS and not downloads:
        downloads = tuple(_DOWNLOAD + name for name in checkpoints if isinstance(paths.resolve(name), str))
    return CatalogueEntry(
        path=path,
        title=re.split(r"\.(?:\s+(?=[A-Z`])|$)", text, maxsplit=1)[0].strip(),
        downloads=downloads,
        checkpoints=tuple(dict.fromkeys(checkpoints)),
        whole=any("/" in name for name in ([included] if isinstance(included, str) else included)),
    )

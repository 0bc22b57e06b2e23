"""``solrl list``: the parts of a run (models, strategies, methods, rewards, machines), and their checkpoints."""

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
"""Folders of the parts of which a run has one each, in the order of the command line: later files win."""
WORDS = {
    "scopes": " (optional: which layers explorers quantise, in place of the model's own choice)",
    CLUSTERS: " (without one everything computes on CPUs, which suffices for the demo's model)",
    named.RUNS: " (whole, with a part of each kind)",
}
EXAMPLE = "one_gpu"
"""The cluster in the example command of `table`."""
PROMPTS = ("prompts.train=TRAIN.txt", "prompts.heldout=HELDOUT.txt")
"""Settings that no part contains."""
WIDTH, INDENT = 110, " " * 6
_DOWNLOAD = "hf download "


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    path: Path
    title: str
    """First sentence of the file's comment."""
    downloads: tuple[str, ...]
    """Commands that fetch what it needs: from its comment, or a model's whole repository."""
    checkpoints: tuple[str, ...]
    """Folders and Hugging Face ids that it names."""
    whole: bool
    """Whether it includes other parts, such as rollout and objective together."""


def read() -> dict[str, tuple[CatalogueEntry, ...]]:
    """This package's parts by kind, sorted by name."""
    folder = named.folder()
    kinds = (*KINDS, "scopes", "evaluations", CLUSTERS, named.RUNS)
    found = {kind: tuple(_part(kind, path) for path in sorted((folder / kind).glob("*.yaml"))) for kind in kinds}
    found[named.RUNS] += (_part(named.RUNS, folder / "demo.yaml"),)
    return found


def table() -> str:
    """The output of `solrl list`: the parts, what they need, and how they compose."""
    parts = read()
    lines: list[str] = []
    for kind, listed in parts.items():
        lines.append(kind + WORDS.get(kind, ""))
        for part in listed:
            alone = part.whole and kind in KINDS
            title = f"{part.title} (includes others: name it without a strategy)" if alone else part.title
            lines.append(f"  {part.path.stem}")
            lines += textwrap.wrap(title, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
            lines += [f"{INDENT}{name}" for name in part.checkpoints]
            lines += [f"{INDENT}  {command}" for command in part.downloads]
        lines.append("")
    example = [next(part.path.stem for part in parts[kind] if not part.whole) for kind in KINDS]
    lines.append("One of each kind, in any order; files of your own after them:")
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


def _part(kind: str, path: Path) -> CatalogueEntry:
    values = read_file(path)
    included = values.get(INCLUDE, [])  # a part may build on another one of its own kind
    entries = [values.get("model"), *(values.get("rewards") or [])]
    checkpoints = [entry["path"] for entry in entries if isinstance(entry, dict) and entry.get("path")]
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = [line.lstrip("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]
    said = " ".join(line for line in comment if not line.startswith(_DOWNLOAD))
    downloads = tuple(line for line in comment if line.startswith(_DOWNLOAD))
    if kind == MODELS and not downloads:
        downloads = tuple(_DOWNLOAD + name for name in checkpoints if isinstance(paths.resolve(name), str))
    return CatalogueEntry(
        path=path,
        title=re.split(r"\.(?:\s+(?=[A-Z`])|$)", said, maxsplit=1)[0].strip(),
        downloads=downloads,
        checkpoints=tuple(dict.fromkeys(checkpoints)),
        whole=any("/" in name for name in ([included] if isinstance(included, str) else included)),
    )

"""The report of a validation: ``validation.json`` and ``validation.html``, which may be sent to others."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from solrl_ray.common.files import make_folder, replace_file
from solrl_ray.config import yaml_text
from solrl_ray.config.schema import Config
from solrl_ray.quantization import attestation
from solrl_ray.report.grids import to_picture
from solrl_ray.report.pictures import Card, Gallery, Picture, data_uri
from solrl_ray.report.rendering import write_page
from solrl_ray.report.summary import package_versions
from solrl_ray.validation.outcomes import Outcome
from solrl_ray.validation.session import PROMPTS
from solrl_ray.validation.steps import without_home

JSON_FILE, PAGE_FILE = "validation.json", "validation.html"
LABEL_WIDTH = 104
"""Width of the names of a picture's rows, pixels."""
SECTIONS = ("model", "rollout", "objective", "learner", "publish", "compile")
"""Sections of the configuration that a validation reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Without the host's name, because reports are sent to others."""

    device: str
    memory_gb: float | None
    """Of the GPU."""
    cuda: str
    """Of PyTorch; empty on a CPU."""
    driver: str
    python: str
    versions: dict[str, str]

    @classmethod
    def here(cls, device: torch.device) -> Machine:
        on_gpu = device.type == "cuda"
        return cls(
            device=attestation.device_name(device),
            memory_gb=torch.cuda.get_device_properties(device).total_memory / 1e9 if on_gpu else None,
            cuda=(torch.version.cuda or "") if on_gpu else "",
            driver=_driver() if on_gpu else "",
            python=sys.version.split()[0],
            versions=package_versions(),
        )


def _driver() -> str:
    file = Path("/proc/driver/nvidia/version")
    return file.read_text().splitlines()[0].strip() if file.is_file() else ""


def write(
    folder: Path,
    config: Config,
    machine: Machine,
    outcomes: Sequence[Outcome],
    pictures: Mapping[str, Sequence[Tensor]],
    command: Sequence[str],
) -> Path:
    """Write both files and the pictures; returns the page's path."""
    make_folder(folder)
    dumped = config.model_dump(mode="json")
    told = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "command": without_home(shlex.join(command)),
        "configuration": without_home(yaml_text.dump({name: dumped[name] for name in SECTIONS})),
    }
    content: dict[str, Any] = {
        **told,
        "model": without_home(config.model.path),
        "ok": all(outcome.state in ("ok", "lacks") for outcome in outcomes),
        "machine": asdict(machine),
        "steps": [_plain(outcome) for outcome in outcomes],
    }
    replace_file(folder / JSON_FILE, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())
    path = folder / PAGE_FILE
    gallery = _gallery(folder / "pictures", pictures)
    write_page(
        path,
        "validation.html",
        **told,
        model=content["model"],
        machine=machine,
        outcomes=outcomes,
        gallery=gallery,
        label_width=LABEL_WIDTH,
    )
    return path


def _plain(outcome: Outcome) -> dict[str, Any]:
    """As JSON, which lacks infinity and NaN."""
    plain = asdict(outcome)
    for measure in plain["measures"]:
        if isinstance(measure["value"], float) and not math.isfinite(measure["value"]):
            measure["value"] = str(measure["value"])
    return plain


def _gallery(folder: Path, pictures: Mapping[str, Sequence[Tensor]]) -> Gallery:
    """One card: a row for each way to draw the first prompt's pictures."""
    if not pictures:
        return Gallery([])
    make_folder(folder)
    rows: dict[str, list[Picture | None]] = {}
    columns = max(map(len, pictures.values()))
    for row, images in pictures.items():
        shown: list[Picture | None] = []
        for number, image in enumerate(images):
            path = folder / f"{row.replace(', ', '-').replace(' ', '-')}-{number}.png"
            to_picture(image.nan_to_num()).save(path)
            shown.append(Picture(data_uri(path), f"{row}, {number}", ""))
        rows[row] = shown + [None] * (columns - len(shown))
    return Gallery([Card(PROMPTS[0], [], rows)])

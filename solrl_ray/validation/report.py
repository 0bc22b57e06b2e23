"""The report of a validation: ``validation.json`` and ``validation.html``, which may be sent to others."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from solrl_ray.common.files import make_folder, replace_file
from solrl_ray.config import yaml_text
from solrl_ray.quantization import attestation
from solrl_ray.report.grids import to_picture
from solrl_ray.report.pictures import Card, Gallery, Picture, data_uri
from solrl_ray.report.rendering import write_page
from solrl_ray.report.summary import package_versions
from solrl_ray.validation.session import TEXTS, Session
from solrl_ray.validation.steps import Outcome, without_home

JSON_FILE, PAGE_FILE = "validation.json", "validation.html"
LABEL_WIDTH = 104
"""Width of the names of a picture's rows, pixels."""
SECTIONS = ("model", "rollout", "objective", "learner", "publish", "compile")
"""Sections of the configuration that a validation reads."""


def write(folder: Path, session: Session, outcomes: Sequence[Outcome], command: Sequence[str]) -> Path:
    """Write both files and the pictures; returns the page's path."""
    dumped = session.config.model_dump(mode="json")
    told = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "command": without_home(shlex.join(command)),
        "configuration": without_home(yaml_text.dump({name: dumped[name] for name in SECTIONS})),
        "model": without_home(session.config.model.path),
        "machine": _machine(session.device),
    }
    content = {
        **told,
        "ok": all(outcome.state in ("ok", "lacks") for outcome in outcomes),
        "steps": [_plain(outcome) for outcome in outcomes],
    }
    replace_file(folder / JSON_FILE, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())
    gallery = _gallery(folder / "pictures", session)
    page = folder / PAGE_FILE
    write_page(page, "validation.html", **told, outcomes=outcomes, gallery=gallery, label_width=LABEL_WIDTH)
    return page


def _machine(device: torch.device) -> dict[str, Any]:
    """Without the host's name, because reports are sent to others. Memory, CUDA and driver are a GPU's."""
    on_gpu, driver = device.type == "cuda", Path("/proc/driver/nvidia/version")
    return {
        "device": attestation.device_name(device),
        "memory_gb": torch.cuda.get_device_properties(device).total_memory / 1e9 if on_gpu else None,
        "cuda": (torch.version.cuda or "") if on_gpu else "",
        "driver": driver.read_text().splitlines()[0].strip() if on_gpu and driver.is_file() else "",
        "python": sys.version.split()[0],
        "versions": package_versions(),
    }


def _plain(outcome: Outcome) -> dict[str, Any]:
    """As JSON, which lacks infinity and NaN."""
    plain = asdict(outcome)
    for measure in plain["measures"]:
        if isinstance(measure["value"], float) and not math.isfinite(measure["value"]):
            measure["value"] = str(measure["value"])
    return plain


def _gallery(folder: Path, session: Session) -> Gallery:
    """One card: a row for each way to draw the first prompt's pictures."""
    rows: dict[str, list[Picture | None]] = {}
    columns = max(map(len, session.pictures.values()), default=0)
    make_folder(folder)
    for row, images in session.pictures.items():
        shown: list[Picture | None] = [None] * columns
        for number, image in enumerate(images):
            path = folder / f"{row.replace(', ', '-').replace(' ', '-')}-{number}.png"
            to_picture(image.nan_to_num()).save(path)
            shown[number] = Picture(data_uri(path), f"{row}, {number}", "")
        rows[row] = shown
    return Gallery([Card(TEXTS[0], [], rows)] if rows else [])

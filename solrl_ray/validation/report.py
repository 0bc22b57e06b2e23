"""What a validation writes, for its reader and to be sent to others: ``validation.json`` and ``pictures.png``."""

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

from solrl_ray.common.files import replace_file
from solrl_ray.quantization import attestation
from solrl_ray.report.grids import contact_sheet, encode_png
from solrl_ray.report.summary import package_versions
from solrl_ray.validation.session import TEXTS, Session
from solrl_ray.validation.steps import Outcome, without_home

JSON_FILE, PICTURES_FILE = "validation.json", "pictures.png"
SECTIONS = ("model", "rollout", "objective", "learner", "publish", "compile")
"""Sections of the configuration that a validation reads."""


def write(folder: Path, session: Session, outcomes: Sequence[Outcome], command: Sequence[str]) -> Path:
    """Write both files; returns the first one's path. No host is named, and no home folder."""
    dumped, device, gpu = session.config.model_dump(mode="json"), session.device, dict[str, Any]()
    if device.type == "cuda":
        gpu = {"memory_gb": torch.cuda.get_device_properties(device).total_memory / 1e9, "cuda": torch.version.cuda}
        if (driver := Path("/proc/driver/nvidia/version")).is_file():
            gpu["driver"] = driver.read_text().splitlines()[0].strip()
    versions = {"python": sys.version.split()[0], **package_versions()}
    content = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "command": shlex.join(command),
        "machine": {"device": attestation.device_name(device), **gpu, "versions": versions},
        "ok": all(outcome.state in ("ok", "lacks") for outcome in outcomes),
        "steps": [asdict(outcome) for outcome in outcomes],
        "rows of pictures.png": list(session.pictures),
        "prompt": TEXTS[0],
        "configuration": {name: dumped[name] for name in SECTIONS},
    }
    replace_file(folder / JSON_FILE, (json.dumps(_plain(content), indent=2, allow_nan=False) + "\n").encode())
    if session.pictures:
        rows = [[image.nan_to_num() for image in images] for images in session.pictures.values()]
        replace_file(folder / PICTURES_FILE, encode_png(contact_sheet(rows)))
    return folder / JSON_FILE


def _plain(value: Any) -> Any:
    """As JSON, which lacks infinity and NaN, and without the user's home folder."""
    match value:
        case dict():
            return {name: _plain(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case float() if not math.isfinite(value):
            return str(value)
        case str():
            return without_home(value)
    return value

"""``solrl doctor``: tests this machine: versions, devices, a self-test of every precision tier, storage."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from solrl_ray.common.files import NO_NAMES, refuses_files, syncs_names
from solrl_ray.errors import RunError
from solrl_ray.models import compilation
from solrl_ray.quantization import attestation, capability

LIBRARIES = ("torch", "ray", "diffusers", "transformers", "peft", "deepspeed", "transformer-engine")
NOTES = {
    "nvfp4": "written to Transformer Engine's documented interface; we have not yet run it on a Blackwell GPU",
    "nvfp4-emulated": "NVFP4's numerics, not its speed",
    "fp8": "FP8, which is not NVFP4",
}


@dataclass(frozen=True, slots=True)
class Finding:
    part: str
    what: str
    state: str
    """``ok``, ``lacks`` (unavailable, which may be fine) or ``FAILS``."""
    detail: str


def examine(root: Path) -> Iterator[Finding]:
    """All findings about this machine. `root`: parent folder of the runs."""
    yield Finding("system", "Python", "ok", f"{platform.python_version()} on {platform.platform(terse=True)}")
    for library in LIBRARIES:
        try:
            yield Finding("libraries", library, "ok", metadata.version(library))
        except metadata.PackageNotFoundError:
            yield Finding("libraries", library, "lacks", "not installed")
    for device in devices():
        yield from _device(device)
    yield from _storage(root)


def devices() -> list[torch.device]:
    """The CPU and every GPU that PyTorch sees."""
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]


def _device(device: torch.device) -> Iterator[Finding]:
    part = str(device)
    memory = f", {torch.cuda.get_device_properties(device).total_memory / 1e9:.0f} GB" if device.type == "cuda" else ""
    auto = capability.resolve("auto", device, "bfloat16")
    name = f"{attestation.device_name(device)}{memory}; precision auto is {auto} for a bfloat16 model"
    yield Finding(part, "device", "ok", name)
    for tier in capability.QUANTIZED_TIERS:
        lacking = capability.lacks(tier, device)
        if lacking:
            yield Finding(part, tier, "lacks", lacking)
            continue
        try:
            checks = attestation.check_tier(tier, device)
        except RunError as error:
            yield Finding(part, tier, "FAILS", str(error))
            continue
        tested = "; ".join(f"{check}: {result}" for check, result in checks.items())
        yield Finding(part, tier, "ok", f"{NOTES[tier]} · {tested}")


def _storage(root: Path) -> Iterator[Finding]:
    folders = (("runs", root), ("compiled code", compilation.cache_folder("")))
    for what, path in folders:
        folder = path.absolute()
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        problem = refuses_files(existing) or ("" if free else "is full")
        if problem:
            yield Finding("storage", what, "FAILS", f"{folder}: {existing} {problem}")
        else:
            lacking = "" if syncs_names(existing) else f"; {NO_NAMES}"
            yield Finding("storage", what, "lacks" if lacking else "ok", f"{folder}, {free / 1e9:.1f} GB free{lacking}")

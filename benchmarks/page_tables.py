"""Results files, the paper's figures, tables and commands: shared by the modules of the results pages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PUBLISHED = json.loads((ROOT / "benchmarks" / "published.json").read_text())
TITLES = {"flux": "FLUX.1-dev, 512 px", "sd3": "SD3.5-Large, 1024 px", "sana": "SANA 1.6B, 1024 px"}
OTHERS = {
    "flux_kontext": "FLUX.1-Kontext-dev, 512 px",
    "qwen_image": "Qwen-Image, 512 px",
    "qwen_image_edit": "Qwen-Image-Edit, 512 px",
    "z_image": "Z-Image, 512 px",
    "sd3_medium": "SD3.5-Medium",
    "sana_video": "SANA-Video 2B",
    "wan": "Wan 2.1 1.3B",
    "wan_14b": "Wan 2.1 14B",
    "wan22": "Wan 2.2 5B",
}
"""Models outside the paper."""
WORLD = "python benchmarks/world_shapes.py {} --gpu --mps --at-once 16 --seconds 480 --seeds {} --rates {}"
COMMANDS = {
    "shapes": "python benchmarks/shapes.py --gpu --gpus 4 --mps --at-once 64 --seconds 560",
    "moving": WORLD.format("runs/moving/world", 2, "1e-4 2e-4 5e-4"),
    "emoji": WORLD.format("emoji/world", 3, "1e-4 3e-4 6e-4"),
    "ranking": "python benchmarks/rank_fidelity.py --prompts 256 --seeds 96 --work FOLDER --device cuda",
    "gpus": "python benchmarks/many_gpus.py flux --gpus 2",
    "hosts": "python benchmarks/many_gpus.py flux --plan h100-80",
}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


def measured(name: str) -> str:
    """The line under a table: the command that measures it, which continues from the results file."""
    return f"Measured by `{COMMANDS[name]}`"


def unmeasured(name: str, what: str = "Not measured yet") -> str:
    return f"{what}: `{COMMANDS[name]}`"


def read(results: Path, name: str) -> Any:
    """Content of a results file; None if it does not exist."""
    file = results / name
    return json.loads(file.read_text()) if file.is_file() else None

"""Shared by the scripts on published model sizes: paths, checkpoints, command line options, and running commands."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from solrl_ray import models
from solrl_ray.config.schema import Model
from solrl_ray.errors import UserError
from solrl_ray.prompts.embedding_cache import embedding_digest
from solrl_ray.prompts.encoding import encode_prompts
from solrl_ray.prompts.prompt_set import negative_prompt
from solrl_ray.records import Prompt, PromptEmbedding

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "configs"
EDITING = HERE.parent / "examples" / "editing" / "edits.py"
"""Script that writes prompts with reference images."""
RESULTS = HERE / "results"
MODELS = {
    "flux": "flux1_dev.yaml",
    "flux_kontext": "flux1_kontext_dev.yaml",
    "sd3": "sd35_large.yaml",
    "sd3_medium": "sd35_medium.yaml",
    "sana": "sana_1600m.yaml",
    "sana_video": "sana_video_2b.yaml",
    "qwen_image": "qwen_image.yaml",
    "qwen_image_edit": "qwen_image_edit.yaml",
    "wan": "wan21_1_3b.yaml",
    "wan_14b": "wan21_14b.yaml",
    "wan22": "wan22_5b.yaml",
    "z_image": "z_image.yaml",
}
"""Name in `full_size.py` → file in configs/models."""
EDITS = ("flux_kontext", "qwen_image_edit")
"""Models whose prompts have a reference image."""
VIDEOS = ("sana_video", "wan", "wan_14b", "wan22")
"""Models that generate videos."""
SCORED_FRAMES = 4
"""Frames of a video that CLIPScore sees, one by one."""
SOL_RL = CONFIGS / "methods" / "sol_rl_published.yaml"
"""The method file whose sizes the speed benchmarks measure and plan."""
PRUNED = ("rollout.preview.prune={after: 2, keep: 36}", "rollout.explore.micro_batch=12")
PROMPTS = "prompts={train: builtin:testbed/prompts/train.txt, heldout: builtin:testbed/prompts/heldout.txt}"
STOP_SECONDS = 60.0
"""Seconds that a terminated run gets before it is killed."""


@contextmanager
def reported_errors() -> Iterator[None]:
    """Prints a UserError as `error: …` and exits with status 2."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, help="transformer blocks of each kind, for a trial on a small machine")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for solrl train")
    parser.add_argument("--work", type=Path, default=Path("full_size"), help="checkpoints and run folders")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments, with an absolute `--work`."""
    arguments = parser.parse_args(argv)
    arguments.work = arguments.work.absolute()
    return arguments


def make(model: str, work: Path, layers: int | None) -> None:
    """Write missing checkpoints of the model and of CLIPScore, and prompts for an editing model."""
    if model in EDITS:
        subprocess.run([sys.executable, EDITING, work / "edits", "--only-prompts"], check=True)
    for name in (model, "clip"):
        if not (work / name).exists():
            depth = ["--layers", str(layers)] if layers and name != "clip" else []
            subprocess.run([sys.executable, HERE / "full_size.py", name, work / name, *depth], check=True)


def checkpoints(model: str, work: Path) -> list[str]:
    """Settings for a run with the checkpoints and prompts written by `make`."""
    reward, prompts = "clipscore", PROMPTS
    if model in EDITS:
        parts = ", ".join(f"{part}: '{work / 'edits' / part}.jsonl'" for part in ("train", "heldout"))
        reward, prompts = "clip_edit", f"prompts={{{parts}}}"
    frames = f", frames: {{count: {SCORED_FRAMES}}}" if model in VIDEOS else ""
    return [f"model.path='{work / model}'", f"rewards=[{{kind: {reward}, path: '{work / 'clip'}'{frames}}}]", prompts]


def embeddings(config: Model, prompts: Sequence[Prompt]) -> list[PromptEmbedding]:
    """Prompt embeddings, encoded in this process, with reference images and negative prompts if the model uses them."""
    model = models.load(config, "cpu", components=models.encoder_components(config))
    pairs = [(prompt, negative_prompt(config, prompt.references)) for prompt in prompts]
    wanted = list(dict.fromkeys(prompt for pair in pairs for prompt in pair if prompt))
    made = {
        prompt: PromptEmbedding(prompt_id=prompt.id, digest=embedding_digest(tensors), tensors=tensors)
        for prompt, tensors in zip(wanted, encode_prompts(model, wanted), strict=True)
    }
    return [made[prompt].against(made[other]) if other else made[prompt] for prompt, other in pairs]


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def run_until(command: Sequence[str | Path], seconds: float) -> int | None:
    """Run a command; returns its exit status, or None if it took longer than `seconds` and was stopped."""
    process = subprocess.Popen(command)
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        return None

"""What a model costs on a card, as `solrl_ray/planning/price_lists` has it, from what was measured there.

    python benchmarks/rollout.py wan …; python benchmarks/learner.py wan …; python benchmarks/price_rows.py wan

Prints the entry of `models`, to be pasted: milliseconds of a sample. A solver step is a rollout's time less that of its
decoding and scoring. If the eager pass that was measured computes activations again, the one that keeps all is
estimated as that less a forward; if it keeps all, plans make the other of it.
Revisions that are sent and checkpoints are estimated: as much a weight that LoRA touches as FLUX.1-dev's on an H200.

`--on CARD` says that the figures are of that other card, of the same speed by its data sheet: then all are estimates.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import CONFIGS, MODELS, RESULTS, SOL_RL, told

from solrl_ray.config.loading import Sources, load
from solrl_ray.config.schema import Config
from solrl_ray.errors import UserError
from solrl_ray.models.shapes import shipped
from solrl_ray.planning.arithmetic import ModelFacts
from solrl_ray.planning.outline import facts_of
from solrl_ray.planning.prices import TOUCHED

INPUTS = ("prompts={train: unused, heldout: unused}", "rewards=[{kind: clipscore}]")
MOVED = {"publication": 2330.0, "load": 500.0, "checkpoint": 1460.0}
"""Milliseconds of FLUX.1-dev on an H200 (h200.yaml)."""

ESTIMATED = {
    "backward": "the one that computes again, less a forward",
    "compiled.half": "between activation memory 0 and 1",
}
"""Pass → how it is estimated if it was not measured."""
SIDES = ("eager", "compiled, activation memory 1", "compiled, activation memory 0")
"""Of a learner's file, which are needed."""
NEEDED = {"rollout": ("tier", "settings", "sampling", "seconds"), "learner": ("sides",)}


def read(kind: str, model: str, folder: Path) -> dict[str, Any]:
    """What `rollout.py` or `learner.py` wrote. Raises UserError if it is not there or lacks what an entry needs."""
    file, options = folder / f"{kind}_{model}.json", " --memory 1 0.5 0" * (kind == "learner")
    command = f"python benchmarks/{kind}.py {model}{options} --out {folder}"
    if not file.is_file():
        raise UserError(f"{file} is not there; `{command}` writes it.")
    found: dict[str, Any] = json.loads(file.read_text())
    missing = [f"`{key}`" for key in NEEDED[kind] if key not in found]
    if "sides" in found:
        sides = [one["side"] for one in found["sides"]]
        missing += [f"side `{side}`" for side in SIDES if side not in sides]
    if missing:
        raise UserError(f"{file} has no {' and no '.join(missing)}; `{command}` writes one that has.")
    return found


def described(model: str, settings: list[str], tier: str) -> tuple[Config, ModelFacts]:
    """The shipped model, sampled as it was measured."""
    sampling = [text for text in settings if not text.startswith(("compile.", "rollout.", "rewards"))]
    config = load([SOL_RL, CONFIGS / "models" / MODELS[model]], [*INPUTS, *sampling])
    shapes = shipped(config.model)
    assert shapes is not None
    return config, facts_of(config, Sources(), shapes, tier)


def steps(rollout: dict[str, Any]) -> dict[str, float]:
    """Tier → milliseconds of a solver step; `decode` → of an image."""
    took, drawn = rollout["seconds"], rollout["sampling"]
    pool = drawn["pool"]
    return {
        "bf16": 1000 * (took["naive"] - took["decode, score: naive"]) / (pool * drawn["steps"]),
        rollout["tier"]: 1000 * (took["previews"] - took["decode, score: previews"]) / (pool * drawn["preview_steps"]),
        "decode": 1000 * took["decode, score: naive"] / pool,
    }


def passes(learner: dict[str, Any]) -> dict[str, tuple[float, bool]]:
    """Field, a compiled one's with a dot → milliseconds, and whether they were measured. Of all `SIDES`."""
    sides = {one["side"]: one["milliseconds"] for one in learner["sides"]}
    keeps_all = {one["side"]: one["activation_memory"] for one in learner["sides"]}["eager"] == 1
    eager, found = sides["eager"], dict[str, tuple[float, bool]]()
    forward = (eager["base"] + eager["old"]) / 2
    found["forward"] = forward, True
    found["backward"] = (eager["default"], True) if keeps_all else (eager["default"] - forward, False)
    if not keeps_all:
        found["backward_checkpointed"] = eager["default"], True
    whole, again = (sides[f"compiled, activation memory {share}"] for share in (1, 0))
    half = sides.get("compiled, activation memory 0.5")
    found["compiled.forward"] = (whole["base"] + whole["old"]) / 2, True
    found["compiled.backward"] = whole["default"], True
    found["compiled.half"] = half["default"] if half else (whole["default"] + again["default"]) / 2, bool(half)
    found["compiled.recomputed"] = again["default"], True
    return found


def entry(model: str, rollout: dict[str, Any], learner: dict[str, Any], on: str) -> str:
    """The lines of one model."""
    config, facts = described(model, rollout["settings"], rollout["tier"])
    where = f", on {on}" if on else ""

    def figure(ms: float, source: str, measured: bool = True, weights: str = "") -> str:
        said = str(measured and not on).lower()
        return f'{{ms: {ms:.4g}, {weights}measured: {said}, source: "{source}{where}"}}'

    of = steps(rollout)
    moved = {name: ms * facts.touched_parameters / TOUCHED for name, ms in MOVED.items()}
    shape = config.model.shapes[0]
    lines = [
        f"  - family: {config.model.family}",
        f"    parameters: {facts.parameters}",
        f"    resolution: [{shape.height}, {shape.width}]",
        *([f"    frames: {shape.frames}"] if shape.frames else []),
        "    steps:",
        f"      bf16: {figure(of['bf16'], f'rollout_{model}.json, compiled')}",
        f"      {rollout['tier']}: "
        + figure(of[rollout["tier"]], "the same, per-row scales", weights=f"weights: {facts.quantized_share:.3f}, "),
        f"    decode_and_reward: {figure(of['decode'], f'rollout_{model}.json: its VAE, BF16, and CLIPScore')}",
    ]
    assumed, source = "assumed: FLUX.1-dev's, by the weights that LoRA touches", f"learner_{model}.json"
    plain, compiled = (
        [
            f"{name.removeprefix('compiled.')}: {figure(ms, source if ok else ESTIMATED[name], ok)}"
            for name, (ms, ok) in passes(learner).items()
            if name.startswith("compiled.") == inside
        ]
        for inside in (False, True)
    )
    lines += [*(f"    {line}" for line in plain), "    compiled:", *(f"      {line}" for line in compiled)]
    return "\n".join([*lines, *(f"    {name}: {figure(ms, assumed, False)}" for name, ms in moved.items())])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--on", default="", metavar="CARD", help="the other card that the figures are of")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args(argv)
    kinds = ("rollout", "learner")
    rollout, learner = (read(kind, arguments.model, arguments.out) for kind in kinds)
    print(entry(arguments.model, rollout, learner, arguments.on))


if __name__ == "__main__":
    with told():
        main()

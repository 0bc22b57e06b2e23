"""A run's policies by Sol-RL's four rewards, every 20 iterations, beside the paper's figures.

    python benchmarks/published_evaluation.py runs/flux1_dev_published [--every 20] [--rewards published_rewards]
                                              [--set KEY=VALUE …] [--address ADDRESS]

For runs with `configs/evaluations/published.yaml`, whose checkpoints of every 20th iteration stay: each is evaluated by
`solrl eval` on the run's held-out prompts, the moving average alone, and with the first of them the base. An evaluation
that is there is not made again, so the same command goes on, and follows a run that is live.

Prints a table and writes benchmarks/results/published_NAME.json (`NAME`: the folder).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from campaign import REPOSITORY

from solrl_ray.storage.run_folder import RunFolder

RESULTS = REPOSITORY / "benchmarks" / "results"


def due(updates: Sequence[int], every: int) -> list[int]:
    """Of the checkpoints that are there: each `every`-th, and the last one."""
    return sorted({number for number in updates if number and (number % every == 0 or number == max(updates))})


def evaluate(run: Path, updates: int, policies: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The cells of `evaluation.json`, by policy and reward."""
    out = run / "eval" / f"published-{updates:06d}"
    file = out / "evaluation.json"
    if not file.is_file():
        command = [sys.executable, "-m", "solrl_ray", "eval", str(run), "--updates", str(updates), "--no-live"]
        command += ["--policies", policies, "--rewards", arguments.rewards, "--out", str(out)]
        command += ["--address", arguments.address] if arguments.address else []
        command += [part for text in arguments.set for part in ("--set", text)]
        subprocess.run(command, check=True, cwd=REPOSITORY)
    content = json.loads(file.read_text())
    found: dict[str, Any] = {"settings": content["settings"]}
    for cell in content["cells"]:
        found.setdefault(cell["policy"], {})[cell["reward"]] = [cell["mean"], cell["stderr"]]
    return found


def show(rows: Sequence[dict[str, Any]], base: dict[str, list[float]]) -> None:
    print("| iterations | " + " | ".join(base) + " |")
    print("|---|" + "---|" * len(base))
    for updates, scores in [(0, base), *((row["updates"], row["scores"]) for row in rows)]:
        print(f"| {updates} | " + " | ".join(f"{mean:.4f} ± {error:.4f}" for mean, error in scores.values()) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--every", type=int, default=20, metavar="N", help="iterations between evaluated policies")
    parser.add_argument("--rewards", default="published_rewards", metavar="NAME|FILE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of `solrl eval`")
    parser.add_argument("--address", help="a cluster's")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    run = arguments.run.absolute()
    numbers = due([number for number, _ in RunFolder(run).checkpoints()], arguments.every)
    if not numbers:
        sys.exit(f"{run} has no checkpoint of an iteration yet.")
    found = {n: evaluate(run, n, "base,ema" if n == numbers[0] else "ema", arguments) for n in numbers}
    rows = [{"updates": n, "scores": found[n]["ema"]} for n in numbers]
    first = next(content for content in found.values() if "base" in content)
    show(rows, first["base"])
    result = {"run": run.name, "settings": first["settings"], "base": first["base"], "rows": rows}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"published_{run.name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Does a reward of small weight and large scale stay small: summed as it is, and with own statistics? On the testbed.

    python benchmarks/own_statistics.py [--seeds 3] [--iterations 12] [--at-once 1] [--gpu] [--seconds 600]
        [--root runs/own_statistics] [--results benchmarks/results/own_statistics.json]

Runs of the demo on CLIPScore and, with a quarter of its weight, on 100 times the redness of a picture, whose deviation
is much larger and which contradicts it: most pictures that fit their captions are not red. Each finished
run is evaluated by both rewards. Writes the gains of each on held-out prompts with their standard errors, by row and
seed, and prints them. A begun run goes on where it was, so several short calls add up.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from campaign import ON_ONE_GPU, REPOSITORY, Job, train_all

from solrl_ray.storage.run_folder import RunFolder

RESULTS = REPOSITORY / "benchmarks" / "results" / "own_statistics.json"
REDNESS = f"{REPOSITORY}/examples/own_reward/my_rewards.py:redder"
LARGE = "normalize: {mean: 0, std: 0.01}"  # not a weight, which would count after a reward's own statistics
REWARDS = f"rewards=[{{kind: clipscore, path: 'builtin:testbed/reward'}}, {{kind: '{REDNESS}', weight: 0.25, {LARGE}}}]"
ROWS = {"summed": "global", "own statistics": "gdpo"}
"""Row → `objective.advantage.std`."""


def job(row: str, seed: int, arguments: argparse.Namespace) -> Job:
    name = f"{ROWS[row]}-{seed}"
    settings = (
        REWARDS,
        f"objective.advantage.std={ROWS[row]}",
        f"run={{name: {name}, root: '{arguments.root}', seed: {seed}, iterations: {arguments.iterations}}}",
        "evaluation={every: 100, prompts: 64, samples: 4, steps: 10, pictures: 0, reference: ''}",
        *(ON_ONE_GPU if arguments.gpu else ()),
    )
    return Job((REPOSITORY / "configs" / "demo.yaml",), settings)


def evaluate(each: Job) -> list[str] | None:
    """The command that evaluates a finished run by each reward; None if that was done."""
    folder = RunFolder.of(each.config).path
    if (folder / "each" / "evaluation.json").is_file():
        return None
    parts = folder / "redness.yaml"
    parts.write_text(f"rewards:\n  - {{kind: '{REDNESS}', weight: 1.0}}\n")
    command = [sys.executable, "-m", "solrl_ray", "eval", str(folder), "--rewards", "testbed_clip", str(parts)]
    return [*command, "--out", str(folder / "each"), "--no-live"]


def gains(each: Job) -> dict[str, list[float]] | None:
    """Reward → gain of the held-out mean over the base, and its standard error; None if the run is not evaluated."""
    file = RunFolder.of(each.config).path / "each" / "evaluation.json"
    if not file.is_file():
        return None
    cells = json.loads(file.read_text())["cells"]
    trained = [cell for cell in cells if cell["policy"] == "ema"]
    return {cell["reward"].rpartition(":")[2]: [cell["gain"], cell["gain_stderr"]] for cell in trained}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop what still trains after so long")
    parser.add_argument("--root", type=Path, default=Path("runs/own_statistics"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    jobs = {(row, 42 + n): job(row, 42 + n, arguments) for n in range(arguments.seeds) for row in ROWS}
    train_all(list(jobs.values()), at_once=arguments.at_once, seconds=arguments.seconds, after=evaluate)
    found: dict[str, Any] = {row: {} for row in ROWS}
    for (row, seed), each in jobs.items():
        if (gained := gains(each)) is not None:
            found[row][str(seed)] = gained
    arguments.results.write_text(json.dumps({"iterations": arguments.iterations, "gains": found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

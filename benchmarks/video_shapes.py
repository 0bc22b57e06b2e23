"""Do two stages reach a good model of videos sooner than one? Runs of the moving world over charged time.

    python benchmarks/build_video_world.py OUT --seconds 500       # again until it says that all is done
    python benchmarks/video_shapes.py OUT/world --gpu --mps --at-once 16 --seconds 480
    python benchmarks/video_shapes.py OUT/world --gpu --mps --at-once 16 --seconds 480 --rates 1e-3 --seeds 5
    python benchmarks/video_shapes.py OUT/world --show
    python benchmarks/video_shapes.py OUT/world --tiny --seconds 300 --root /tmp/video --results /tmp/video.json

Shapes of an iteration, what ends a run and what is charged are those of `shapes.py`. Previews also decode only the
first and the last latent frame of three, which is not in the charge: no time of a video model has been measured, so an
iteration is charged as FLUX.1-dev's on an H200. After `--seconds` what still trains is stopped; the same command goes
on with it. OUT/world may have been moved since it was built.

Prints the shapes, soonest first; writes what `shapes.py` does. Rewards are brought to its scale: .45 is the world's
untrained model, .95 its real clips (`build.json`), both on held-out captions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shapes
from build_video_world import configuration
from campaign import REPOSITORY, Job, train_all
from shape_results import BASE, RATES, REAL, SEEDS, SHAPES, show, summary
from shapes import Key

RESULTS = REPOSITORY / "benchmarks" / "results" / "video_shapes.json"
NAMES = tuple(f"{shape}{end}" for shape in ("1x3_4of24", "2x1_8of8") for end in ("+shared_noise_kl_0", ""))
"""The soonest shape of each side of the testbed's map, and the same without its option."""
LIMIT = 3000.0
"""Charged seconds of a run; the soonest of the testbed's map are at 90 % of the way after 1,600 and 2,600."""


class World:
    """The folder that `build_video_world.py` wrote."""

    def __init__(self, folder: Path) -> None:
        """Exits with a sentence if it is not built."""
        self.folder, file = folder.absolute(), folder / "build.json"
        found = json.loads(file.read_text()) if file.is_file() else {}
        if not found.get("done"):
            sys.exit(f"{folder} has no build.json that is done: run benchmarks/build_video_world.py until it says so")
        self._base, self._real = found["model"]["reward"], found["real"]["reward"]

    def job(self, key: Key, arguments: argparse.Namespace) -> Job:
        """`key`'s run, of this world."""
        made, own = key.job(arguments), configuration(self.folder)
        if not SHAPES[key.shape].pool:
            del own["rollout"]  # one stage has no previews
        settings = (f"{section}={json.dumps(values)}" for section, values in own.items())  # JSON is YAML
        return Job(made.files, (*settings, *made.overrides))

    def scaled(self, reward: float) -> float:
        return BASE + (reward - self._base) / (self._real - self._base) * (REAL - BASE)


def train(keys: Sequence[Key], world: World, results: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Train runs for `arguments.seconds` at most, and put them into the results, which are saved meanwhile."""
    jobs = {world.job(key, arguments): key for key in keys}

    def look(job: Job) -> bool:
        """Keep what a run has so far; whether it has ended."""
        key = jobs[job]
        run = shapes.run_of(key, key.folder(arguments), key.iterations(arguments), scaled=world.scaled)
        if run:
            key.keep(results, run)
            shapes.save(results, arguments.results)
        return run is not None and run["ended"] == "reached"

    with shapes.mps(1, arguments.mps) as places:
        train_all(list(jobs), at_once=arguments.at_once, seconds=arguments.seconds, places=places, enough=look)
    for job in jobs:
        look(job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", type=Path, metavar="OUT/world")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, metavar="NAME", default=NAMES)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES[:3], help="learning rates")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help=f"of {', '.join(map(str, SEEDS))}")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs side by side")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop what still trains after so long")
    parser.add_argument("--limit", type=float, default=LIMIT, help="charged seconds of a run, as FLUX.1-dev")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--mps", action="store_true", help="start NVIDIA's MPS")
    parser.add_argument("--tiny", action="store_true", help="a shape of each side, a few iterations, for a CPU")
    parser.add_argument("--show", action="store_true", help="print what the results file has, and train nothing")
    parser.add_argument("--root", type=Path, default=Path("runs/video_shapes"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.shapes, arguments.rates, arguments.limit = shapes.TINY, RATES[:1], shapes.TINY_LIMIT
    results = shapes.opened(arguments.results)
    if not arguments.show:
        wanted = [
            Key(name, rate, seed)
            for seed in SEEDS[: arguments.seeds]
            for rate in arguments.rates
            for name in arguments.shapes
        ]
        missing = [key for key in wanted if not key.has_ended(results)]
        print(f"{len(missing)} of {len(wanted)} runs to train", flush=True)
        train(missing, World(arguments.world), results, arguments)
    results |= summary(results)
    shapes.save(results, arguments.results)
    show(results)


if __name__ == "__main__":
    main()

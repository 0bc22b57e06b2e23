"""Do two stages reach a good model faster than one on other data? Compares settings on emoji and videos.

    python benchmarks/world_shapes.py OUT/world --gpu --mps --at-once 16 --seconds 480 --rates 5e-4 2e-3
    python benchmarks/world_shapes.py OUT/world --gpu --mps --at-once 16 --seconds 480 --best --seeds 3
    python benchmarks/world_shapes.py OUT/world --show
    python benchmarks/world_shapes.py OUT/world --tiny --seconds 300 --root /tmp/shapes --results /tmp/shapes.json

OUT/world is the finished folder written by `build_video_world.py` or `build_emoji.py`; it may have been moved since.

Settings, the end of a run and simulated GPU time are defined as in `shapes.py`: an iteration takes as long as one of
FLUX.1-dev on an H200. For videos, rewards are also shown over the simulated time of Wan 2.2 5B, whose decoding takes
half of a rollout. Previews decode the first and the last of three latent frames, and their simulated time is that of
the same share of Wan's frames; with `--all-frames` both decode all. `--seconds` stops all runs; run the same command
again to resume them. It uses the first GPU of `CUDA_VISIBLE_DEVICES`, or the first `--gpus`.

Prints the settings, fastest first, and rewards after some simulated seconds; writes the same keys as `shapes.py`.
Rewards are scaled linearly: .45 is the untrained model and .95 real images (`build.json`), both on held-out prompts.
The reward for emoji is the example's style, because the match of image and prompt hardly improves within minutes on
prompts that a run does not train on. With a judge, a run's `judge` has the judge's scores of the same held-out images,
on the same scale; they are not used in training.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import build_emoji
import build_video_world
import numpy as np
import shapes
import torch
from campaign import REPOSITORY, Job, train_all
from common import reported_errors
from curves import curves
from PIL import Image
from shape_results import BASE, HEADLINE, RATES, REAL, SEEDS, SHAPES, VIDEO_PREVIEWS, Runs, show, summary
from shape_results import VIDEO as WAN
from shapes import Key

from solrl_ray.report.data import read_run
from solrl_ray.report.grids import picture_paths
from solrl_ray.rewards.callables import import_callable
from solrl_ray.storage.run_folder import RunFolder

FRONT = ("1x3_4of24+shared_noise_kl_0", "2x1_8of8+shared_noise_kl_0")
"""The fastest setting of each side (two stages, one stage) on the testbed."""
Judge = Callable[[torch.Tensor, list[str]], torch.Tensor]
"""Function of images [B, 3, H, W] and their prompts that returns one score each."""
MICRO_BATCH = 96
"""Images per forward in an evaluation."""


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    """Prefix of files and folders."""
    builder: str
    configuration: Callable[[Path], dict[str, Any]]
    shapes: tuple[str, ...]
    place: str
    """Model whose simulated time is used where rewards are printed."""
    limit: float
    """Maximum simulated seconds of a run, as FLUX.1-dev: about ten minutes of a real GPU."""


VIDEO = Kind(
    name="video",
    builder="build_video_world.py",
    configuration=build_video_world.configuration,
    shapes=(*FRONT, *(name.partition("+")[0] for name in FRONT)),
    place=WAN,
    limit=3000.0,
)
EMOJI = Kind(
    name="emoji",
    builder="build_emoji.py",
    configuration=build_emoji.configuration,
    shapes=(*FRONT, "12x1_24of24+shared_noise_kl_0"),
    place=HEADLINE,
    limit=1250.0,
)


class World:
    """A folder written by one of the builders."""

    def __init__(self, folder: Path) -> None:
        """Exits with an error message if the folder is not finished."""
        self.folder, file = folder.absolute(), folder / "build.json"
        self.kind = EMOJI if (folder / "judge").is_dir() else VIDEO
        found = json.loads(file.read_text()) if file.is_file() else {}
        if self.kind is EMOJI:
            found = {"done": found.get("done")} | found.get("look", {})
            os.environ["EMOJI_WORLD"] = str(self.folder)  # for the reward, here and in runs
        names = ("reward", *self.judges)
        if not found.get("done") or any(name not in found.get(end, {}) for end in ("model", "real") for name in names):
            builders = " or ".join(f"benchmarks/{kind.builder}" for kind in (VIDEO, EMOJI))
            sys.exit(
                f"{folder} has no finished build.json with the model's rewards; run {builders} until it prints that "
                "all is done"
            )
        self.ends = {name: [found["model"][name], found["real"][name]] for name in names}
        """``reward`` or ``judge`` → its means for the untrained model and for real images."""
        for name, (base, real) in self.ends.items():
            if real <= base:
                print(f"note: {name} is {real:.3f} for real images and {base:.3f} for the model's, so it is not scaled")

    @property
    def judges(self) -> tuple[str, ...]:
        return ("judge",) if self.kind is EMOJI else ()

    def job(self, key: Key, arguments: argparse.Namespace) -> Job:
        """The run of `key` on this world's data."""
        made, own = key.job(arguments), self.kind.configuration(self.folder)
        if not SHAPES[key.shape].pool or arguments.all_frames:
            own.pop("rollout", None)  # one stage has no previews
        settings = (f"{section}={json.dumps(values)}" for section, values in own.items())  # JSON is YAML
        # The judge needs all evaluated images stored. Larger batches would fill the memory of a GPU that runs share.
        judged = f"evaluation={{pictures: {made.config.evaluation.prompts}, micro_batch: {MICRO_BATCH}}}"
        return Job(made.files, (*settings, *made.overrides, *([judged] if self.judges else ())))

    def scaled(self, value: float, of: str = "reward") -> float:
        base, real = self.ends[of]
        return BASE + (value - base) * ((REAL - BASE) / (real - base) if real > base else 1)

    def judge(self) -> Judge:
        found: Judge = import_callable(f"{build_emoji.LOOK}:judged", "judge")
        return found


def train(keys: Sequence[Key], world: World, results: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Train runs for at most `arguments.seconds` and store them in the results, which are saved repeatedly."""
    jobs = {world.job(key, arguments): key for key in keys}

    def update(job: Job) -> bool:
        """Store a run's curve so far; returns True if it has reached its target."""
        key = jobs[job]
        run = shapes.run_of(key, key.folder(arguments), key.iterations(arguments), scaled=world.scaled)
        if run:
            key.keep(results, run)
            shapes.save(results, arguments.results)
        return run is not None and run["ended"] == "reached"

    with shapes.mps(arguments.gpus, arguments.mps) as places:
        train_all(list(jobs), at_once=arguments.at_once, seconds=arguments.seconds, places=places, enough=update)
    for job in jobs:
        update(job)


def let_judge(keys: Sequence[Key], world: World, results: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Add the judge's score of each evaluation's images to the results, for runs whose folders have all images."""
    judge, device = world.judge(), "cuda" if arguments.gpu else "cpu"
    for key in keys:
        run = results["runs"].get(key.shape, {}).get(f"{key.rate:g}", {}).get(str(key.seed))
        folder = key.folder(arguments)
        if run and RunFolder(folder).begun:
            opinions = opinions_of(folder, judge, device)
            if opinions.keys() >= set(run["iterations"]):
                run["judge"] = [world.scaled(opinions[each], "judge") for each in run["iterations"]]
                shapes.save(results, arguments.results)


@torch.no_grad()
def opinions_of(folder: Path, judge: Judge, device: str = "cpu") -> dict[int, float]:
    """Updates → mean score of the images of the run's evaluation, if all exist; cached in the run folder."""
    file = folder / "judge.json"
    known: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    for record in (each for each in read_run(folder).evaluations if str(each.iteration) not in known):
        paths = picture_paths(folder / "evaluations" / f"updates-{record.iteration:06d}-{record.policy}")
        if paths.keys() != {(prompt, n) for prompt, of in record.rewards.items() for n in range(len(of))}:
            continue
        with ThreadPoolExecutor(8) as pool:
            images = torch.stack(list(pool.map(pixels, paths.values()))).to(device)
        texts = [record.captions[prompt] for prompt, _ in paths]
        known[str(record.iteration)] = judge(images, texts).mean().item()
    file.write_text(json.dumps(known))
    return {int(update): opinion for update, opinion in known.items()}


def pixels(file: Path) -> torch.Tensor:
    """Read an image: float32 [3, H, W] in [0, 1]."""
    return torch.from_numpy(np.asarray(Image.open(file).convert("RGB")).copy()).permute(2, 0, 1) / 255


def best_rate(runs: Runs, shape: str) -> float:
    """The learning rate with the highest mean reward over time, among those whose run of the first seed has ended.

    Unlike in `shapes.py`, a run need not have closed any share of the gap. Exits with an error message if there is no
    such run.
    """
    first = str(SEEDS[0])
    of_rate = {
        rate: of_seed[first] for rate, of_seed in runs.get(shape, {}).items() if of_seed.get(first, {}).get("ended")
    }
    if not of_rate:
        sys.exit(f"--best: no run of {shape} with seed {first} has ended; train some with --rates first")
    last = min(run["iterations"][-1] for run in of_rate.values())

    def area(rate: str) -> float:
        made, reward = of_rate[rate]["iterations"], of_rate[rate]["reward"]
        return float(np.interp(np.linspace(0, last, 100), made, reward).mean())

    return float(max(of_rate, key=area))


def keys_of(world: World, results: dict[str, Any], arguments: argparse.Namespace) -> list[Key]:
    """The requested runs; all runs of one seed before those of the next."""
    rates = {
        name: [best_rate(results["runs"], name)] if arguments.best else arguments.rates
        for name in arguments.shapes or world.kind.shapes
    }
    return [
        Key(name, rate, seed)
        for seed in SEEDS[: arguments.seeds]
        for place in range(max(map(len, rates.values())))
        for name in rates
        for rate in rates[name][place : place + 1]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", type=Path, metavar="OUT/world")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, metavar="NAME", help="settings to compare")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES[:3], help="learning rates")
    parser.add_argument("--best", action="store_true", help="instead of --rates: each setting's best so far")
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        choices=range(1, len(SEEDS) + 1),
        metavar="N",
        help=f"number of seeds, of {', '.join(map(str, SEEDS))}",
    )
    shapes.options(parser)
    parser.add_argument("--all-frames", action="store_true", help="previews of videos decode all frames")
    parser.add_argument("--root", type=Path, help="default: runs/NAME_shapes")
    parser.add_argument("--results", type=Path, help="default: benchmarks/results/NAME_shapes.json")
    arguments = parser.parse_args()
    world = World(arguments.world)
    name, place = f"{world.kind.name}_shapes" + "_all_frames" * arguments.all_frames, world.kind.place
    arguments.root = arguments.root or Path("runs") / name
    arguments.results = arguments.results or REPOSITORY / "benchmarks" / "results" / f"{name}.json"
    arguments.limit = arguments.limit or world.kind.limit
    if arguments.tiny:
        arguments.shapes, arguments.rates, arguments.limit = shapes.TINY, RATES[:1], shapes.TINY_LIMIT
    results = shapes.opened(arguments.results)
    if not arguments.show:
        results["ends"] = world.ends
        wanted = keys_of(world, results, arguments)
        missing = [key for key in wanted if not key.has_ended(results)]
        print(f"{len(missing)} of {len(wanted)} runs to train", flush=True)
        train(missing, world, results, arguments)
        if world.judges:
            let_judge(wanted, world, results, arguments)
    results |= summary(results)
    shapes.save(results, arguments.results)
    show(results)
    print(curves(results, list(VIDEO_PREVIEWS)[1] if place == WAN and arguments.all_frames else place))


if __name__ == "__main__":
    with reported_errors():
        main()

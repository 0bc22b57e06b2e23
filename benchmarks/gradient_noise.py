"""Why does a choice of seeds pay? Signal and noise of a group's gradient, by trained samples and pool.

    python benchmarks/gradient_noise.py [--prompts 64] [--device cuda] [--root runs/gradient_noise]

The gradient of DiffusionNFT on the testbed, of each of `--prompts` groups: the same prompts and seeds for all rows, K
of them without a pool, or the best and worst of 24, 48 or 96 by pruned previews; also with one noise for all samples of
a group. Signal is the squared norm of the gradient
without noise, estimated without bias from pairs of groups; noise the trace of the covariance of one group's gradient.
Previews are in float32, which rank as those in FP8 do (`rank_fidelity.py`). Policies: the base, and one that is part of
the way, whose run in `--root` is trained first if it is not there.

Prints and writes benchmarks/results/gradient_noise.json: by policy and row signal, noise, their ratio and its standard
error (a jackknife over prompts), and charged seconds of a group without an iteration's fixed cost, FLUX.1-dev, H200.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from campaign import ON_ONE_GPU, Job, train_all
from common import CONFIGS, RESULTS
from numpy.typing import NDArray
from shape_results import HEADLINE, PRUNE_AFTER, Shape

from solrl_ray import models, objectives, rewards
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.learning.policy_passes import PolicyPasses
from solrl_ray.learning.state import LearnerState
from solrl_ray.objectives.advantages import advantages
from solrl_ray.objectives.base import MicroBatch, Velocities
from solrl_ray.policy import adapters
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.records import Prompt, PromptEmbedding, Pruning, WorkUnit
from solrl_ray.report.curve import Curve
from solrl_ray.report.data import read_run
from solrl_ray.rollout.sampler import Previewed, Sampler
from solrl_ray.rollout.selection import PromptSelection, survivors
from solrl_ray.sampling.schedules import sigmas
from solrl_ray.storage.run_folder import RunFolder

ROWS = tuple(
    Shape(1, chosen, pool, 1) for pool in (0, 24, 48, 96) for chosen in (4, 8, 24) if not pool or pool > chosen
) + tuple(Shape(1, chosen, pool, 1, "shared_noise") for pool in (0, 24) for chosen in (4, 8))
FILES = (CONFIGS / "demo.yaml", CONFIGS / "methods" / "diffusion_nft.yaml")
MICRO_BATCH = 24
TRAINED, RATE, ITERATIONS = Shape(1, 4, 24, 3, "shared_noise"), 5e-4, 104
"""The run of the second policy."""


class Policy:
    def __init__(self, config: Config, factors: Mapping[str, torch.Tensor] | None, device: str) -> None:
        """`factors`: of its LoRA; None: the base."""
        self.config, self._model = config, models.load(config.model, device, components={"transformer", "vae"})
        self._passes = PolicyPasses(config, self._model)
        if factors is not None:
            adapters.load_factors(self._model.transformer, "default", factors)
        reward, steps = rewards.load(config.rewards, device), config.rollout.regenerate.steps
        self._sample = Sampler(config, self._model, reward, steps=steps, micro_batch=MICRO_BATCH)
        preview_steps = config.rollout.explore.steps
        self._preview = Sampler(config, self._model, reward, steps=preview_steps, micro_batch=MICRO_BATCH)
        grid = sigmas(config.model.schedule, steps, self._model.image_tokens)
        self._objectives = {
            shared: objectives.load(with_shared_noise(config, shared), grid) for shared in (False, True)
        }
        self._factors = list(adapters.parameters(self._model.transformer, "default").values())

    def sample(
        self, prompt: Prompt, embedding: PromptEmbedding
    ) -> tuple[list[list[int]], dict[int, tuple[torch.Tensor, float]]]:
        """The trained seeds of each row, and latent and reward of each seed that is in one."""
        pools = {(row.pool, row.finished) for row in ROWS if row.pool}
        seen = {each: self._previewed(*each, prompt, embedding) for each in pools}
        chosen = [
            _best_and_worst(row, seen[row.pool, row.finished]) if row.pool else list(range(row.chosen)) for row in ROWS
        ]
        seeds = tuple(sorted(set().union(*chosen)))
        unit = WorkUnit(stage="regenerate", iteration=0, revision=0, prompt_id=prompt.id, indices=seeds)
        made = self._sample(unit, prompt, embedding)
        return chosen, dict(zip(seeds, zip(made.latents.cpu(), made.rewards.tolist(), strict=True), strict=True))

    def _previewed(self, pool: int, finished: int, prompt: Prompt, embedding: PromptEmbedding) -> Previewed:
        prune, seeds = Pruning(after=PRUNE_AFTER, keep=finished), tuple(range(pool))
        unit = WorkUnit(stage="explore", iteration=0, revision=0, prompt_id=prompt.id, indices=seeds, prune=prune)
        return self._preview.preview(unit, prompt, embedding)

    def gradient(
        self, row: Shape, embedding: PromptEmbedding, seeds: Sequence[int], x0: torch.Tensor, gains: NDArray[np.float64]
    ) -> torch.Tensor:
        """Of a group: the mean over its samples and their passes, float32 [elements], on the CPU."""
        device, ids = self._model.device, (embedding.prompt_id,) * len(seeds)
        batch = MicroBatch(prompt_ids=ids, indices=tuple(seeds), x0=x0, weights=torch.ones(len(seeds)))
        texts = self._model.batch_embeddings([embedding] * len(seeds))
        objective = self._objectives[row.option == "shared_noise"]
        passes, total = objective.passes(batch, device, 0), torch.zeros((), device=device)
        for one in passes:
            given = {}
            for name in self.config.objective.references():
                with torch.no_grad(), adapters.using(self._model.transformer, name):
                    given[name] = self._passes.velocity(one.x_t, one.t, texts)
            theta = self._passes.velocity(one.x_t, one.t, texts)
            velocities = Velocities(theta=theta, old=theta.detach(), **given)
            total = total + objective.loss(one, velocities, torch.from_numpy(gains).to(device)).total.mean()
        found = torch.autograd.grad(total / len(passes), self._factors)
        return torch.cat([each.reshape(-1) for each in found]).cpu()


def with_shared_noise(config: Config, shared: bool) -> Config:
    return config.model_copy(update={"objective": config.objective.model_copy(update={"shared_noise": shared})})


def _best_and_worst(row: Shape, seen: Previewed) -> list[int]:
    selection, kept = PromptSelection(row.pool, row.chosen, prompt_id=""), survivors(seen.early.tolist(), row.finished)
    for seed, score in enumerate(seen.rewards.tolist()):
        (selection.add if seed in kept else selection.drop)(seed, score)
    return [candidate.index for one_side in selection.select() for candidate in one_side]


def measure(policy: Policy, prompts: Sequence[Prompt], embeddings: Sequence[PromptEmbedding]) -> dict[str, Any]:
    """By row signal, noise and their ratio."""
    sampled = [policy.sample(*each) for each in zip(prompts, embeddings, strict=True)]
    found = {}
    for place, row in enumerate(ROWS):
        seeds = [chosen[place] for chosen, _ in sampled]
        gains = advantages(
            np.array([made[seed][1] for chosen, (_, made) in zip(seeds, sampled, strict=True) for seed in chosen]),
            np.repeat(np.arange(len(prompts)), row.chosen),
            policy.config.objective.advantage,
        ).reshape(len(prompts), row.chosen)
        groups = torch.stack(
            [
                policy.gradient(row, embedding, chosen, torch.stack([made[seed][0] for seed in chosen]), of_group)
                for embedding, chosen, (_, made), of_group in zip(embeddings, seeds, sampled, gains, strict=True)
            ]
        ).double()
        found[row.name[4:]] = signal_and_noise((groups @ groups.T).numpy()) | {"seconds": seconds_a_group(row)}
        print(row.name[4:], found[row.name[4:]], flush=True)
    return found


def signal_and_noise(products: NDArray[np.float64]) -> dict[str, float]:
    """`products`: of each two groups' gradients, [groups, groups]."""
    count, own, with_all = len(products), np.diag(products), products.sum(axis=1)

    def estimates(total: Any, squares: Any, n: int) -> Any:
        """`total`: squared norm of the sum of n gradients; `squares`: sum of their squared norms."""
        return (total - squares) / (n * (n - 1)), (squares - total / n) / (n - 1)

    signal, noise = estimates(products.sum(), own.sum(), count)
    without = estimates(products.sum() - 2 * with_all + own, own.sum() - own, count - 1)  # each left out in turn
    ratios = without[0] / without[1]
    error = math.sqrt(float(np.square(ratios - ratios.mean()).sum()) * (count - 1) / count)
    return {"signal": float(signal), "noise": float(noise), "ratio": float(signal / noise), "stderr": error}


def seconds_a_group(row: Shape) -> float:
    """Charged, without an iteration's fixed cost."""
    few, many = (Shape(prompts, row.chosen, row.pool, 1).charged(HEADLINE) for prompts in (4, 12))
    return (many - few) / (12 - 4)


def training(root: Path, device: str) -> Job:
    where = ON_ONE_GPU if device == "cuda" else ("rollout.explore.precision=nvfp4-emulated",)
    run = f"run={{name: part, root: '{root.absolute()}', iterations: {ITERATIONS}}}"
    held_out = "evaluation={every: 52, prompts: 96, samples: 4, pictures: 0, reference: ''}"
    return Job(
        FILES, (*TRAINED.settings, *TRAINED.larger_batches, *where, run, held_out, f"learner.optimizer.lr={RATE}")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument(
        "--policies", nargs="+", choices=("base", "part of the way"), metavar="NAME", help="default: all"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--root", type=Path, default=Path("runs/gradient_noise"))
    parser.add_argument("--out", type=Path, default=RESULTS / "gradient_noise.json")
    arguments = parser.parse_args()
    config = load(FILES, (*Shape(12, 24, 96, 1).settings, "learner.activation_memory=1"))
    prompts = read_prompts(config.prompts.train)[: arguments.prompts]
    encoded = models.load(config.model, "cpu").encode([prompt.text for prompt in prompts])
    embeddings = [
        PromptEmbedding(prompt_id=prompt.id, tensors=tensors, digest="")
        for prompt, tensors in zip(prompts, encoded, strict=True)
    ]
    job = training(arguments.root, arguments.device)
    train_all([job], at_once=1, seconds=math.inf)
    folder = RunFolder.of(job.config)
    points = Curve.of(read_run(folder.path)).points
    trained = LearnerState.load(folder.checkpoints()[-1][1]).default
    policies = {"base": (None, points[0]), "part of the way": (trained, points[-1])}
    content: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for name in arguments.policies or policies:
        factors, point = policies[name]
        print(name, flush=True)
        rows = measure(Policy(config, factors, arguments.device), prompts, embeddings)
        content[name] = {"prompts": len(prompts), "reward": point.reward, "rows": rows}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

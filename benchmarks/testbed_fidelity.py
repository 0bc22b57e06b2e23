"""Is the testbed a fair stand-in? Rewards of real, base and noise pictures, and how well cheap previews rank.

    python benchmarks/testbed_fidelity.py [--prompts 32] [--seeds 24] [--model FOLDER]

Runs the production path (checkpoint, sampler, decoder, CLIPScore) on held-out prompts with `configs/demo.yaml`.
Spearman's rho compares, per prompt, the rewards of a cheaper preview with those of the full sample of the same
seeds: fewer steps, NVFP4 emulation, both, and both with some layers left unquantised.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

from solrl_ray import models, rewards
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config, QuantizationScope
from solrl_ray.models.base import DiffusionModel
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.quantization.scope import quantize_
from solrl_ray.records import Address, Prompt, PromptEmbedding, WorkUnit
from solrl_ray.rewards.base import Reward
from solrl_ray.rollout.rank_fidelity import rank_fidelity
from solrl_ray.rollout.sampler import Sampler
from solrl_ray.testbed.world import picture

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"

SCOPES: dict[str, list[str]] = {
    "every block linear": [],
    "without query and key": ["to_q", "to_k", "add_q_proj", "add_k_proj"],
    "without the text stream": [".add_", "to_add_out", "ff_context"],
    "without the double-stream block": ["^transformer_blocks"],
    "without attention": ["attn"],
}
"""Layers left unquantised, on top of embedders, adaLN modulation and the final projection."""
ALWAYS = ["x_embedder", "context_embedder", "time_text_embed", "norm", "^proj_out"]


class Bench:
    """Rewards of pools of seeds on the first held-out prompts."""

    def __init__(self, config: Config, prompts: int, seeds: int) -> None:
        self._config, self._seeds = config, seeds
        self._reward: Reward = rewards.load(config.rewards, "cpu")
        self._prompts = read_prompts(config.prompts.heldout)[:prompts]
        self.model = models.load(config.model, "cpu")
        self._embeddings = {
            prompt.id: PromptEmbedding(prompt_id=prompt.id, tensors=tensors, digest="")
            for prompt, tensors in zip(self._prompts, self.model.encode([p.text for p in self._prompts]), strict=True)
        }

    def pool(self, model: DiffusionModel, steps: int, solver: str) -> np.ndarray:
        """Rewards [prompts, seeds] of one pool of seeds per prompt, a micro-batch each."""
        config = self._config.model_copy(update={"rollout": self._config.rollout.model_copy(update={"solver": solver})})
        sampler = Sampler(config, model, self._reward, steps=steps, micro_batch=self._seeds)
        rows = [sampler(self._unit(p), p, self._embeddings[p.id]).rewards.numpy() for p in self._prompts]
        return np.stack(rows)

    def quantized(self, skip: list[str]) -> DiffusionModel:
        """A second model, its transformer quantised to emulated NVFP4."""
        model = models.load(self._config.model, "cpu")
        quantize_(model.transformer, "nvfp4-emulated", QuantizationScope(skip=skip))
        return model

    def real(self) -> np.ndarray:
        return self._score(lambda prompt, index: picture(prompt.text, self._address(prompt, index)))

    def others(self) -> np.ndarray:
        """Real pictures of the next prompt."""
        following = {p.id: n.text for p, n in zip(self._prompts, self._prompts[1:] + self._prompts[:1], strict=True)}
        return self._score(lambda prompt, index: picture(following[prompt.id], self._address(prompt, index)))

    def noise(self) -> np.ndarray:
        """Decoded initial noise."""
        generator = torch.Generator().manual_seed(0)
        return self._score(
            lambda *_: self.model.decode(torch.randn(1, *self.model.latent_shape, generator=generator))[0]
        )

    def _score(self, draw) -> np.ndarray:  # type: ignore[no-untyped-def]
        rows = []
        for prompt in self._prompts:
            images = torch.stack([draw(prompt, index) for index in range(self._seeds)])
            rows.append(self._reward.score(images, [prompt.text] * self._seeds).numpy())
        return np.stack(rows)

    def _address(self, prompt: Prompt, index: int) -> Address:
        return Address(run_seed=self._config.run.seed, purpose="reference", prompt_id=prompt.id, index=index)

    def _unit(self, prompt: Prompt) -> WorkUnit:
        return WorkUnit(
            stage="explore", iteration=0, revision=0, prompt_id=prompt.id, indices=tuple(range(self._seeds))
        )


def measure(bench: Bench, config: Config) -> dict[str, Any]:
    """All figures of the docs page, printed as they come."""
    scope = config.model.quantization.skip
    pictures: dict[str, dict[str, float]] = {}
    for name, values in (("real", bench.real()), ("real, other prompt", bench.others()), ("noise", bench.noise())):
        pictures[name] = _summary(values)
        print(f"{name:20s} reward {pictures[name]['mean']:.3f}")
    quantized = bench.quantized(scope)
    rows = []
    chosen = config.rollout.solver
    proxies: dict[str, np.ndarray] = {}
    for solver in ("euler", "dpm2"):
        full = bench.pool(bench.model, 10, solver)
        if solver == chosen:
            pictures["base"] = _summary(full)
            print(f"{'base':20s} reward {full.mean():.3f}, spread inside a prompt {full.std(axis=1).mean():.3f}")
            proxies["full"] = full
        for name, model, steps in (
            ("float32", bench.model, 6),
            ("nvfp4-emulated", quantized, 10),
            ("nvfp4-emulated", quantized, 6),
            ("nvfp4-emulated", quantized, 4),
        ):
            proxy = bench.pool(model, steps, solver)
            rows.append(_row(f"{solver}, {name}, {steps} steps", proxy, full))
            if (solver, name, steps) == (chosen, "nvfp4-emulated", 6):
                proxies["proxy"] = proxy
    for name, skip in SCOPES.items():
        proxy = bench.pool(bench.quantized(ALWAYS + skip), 6, chosen)
        rows.append(_row(f"{chosen}, 6 steps, {name}", proxy, proxies["full"]))
    return {"pictures": pictures, "fidelity": rows, "skip": scope, "_proxies": proxies}


def _summary(values: np.ndarray) -> dict[str, float]:
    return {"mean": float(values.mean()), "spread_in_prompt": float(values.std(axis=1).mean())}


def _row(name: str, proxy: np.ndarray, full: np.ndarray) -> dict[str, object]:
    fidelity = rank_fidelity(proxy, full)
    row = {
        "preview": name,
        "spearman": fidelity.spearman,
        "kendall": fidelity.kendall,
        "top_bottom_overlap": fidelity.top_bottom_overlap,
        "reward": float(proxy.mean()),
    }
    print(
        f"{name:52s} Spearman {fidelity.spearman:.3f}  Kendall {fidelity.kendall:.3f}  "
        f"halves {fidelity.top_bottom_overlap:.3f}  reward {proxy.mean():.3f}",
        flush=True,
    )
    return row


def plot(proxy: np.ndarray, full: np.ndarray, path: Path) -> None:
    """Ranks inside each prompt and rewards, preview against full sample."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained")
    left.scatter(full.ravel(), proxy.ravel(), s=4, alpha=0.5)
    left.set(xlabel="reward, 10 steps float32", ylabel="reward, 6 steps NVFP4 emulated", title="rewards")
    ranks = [np.argsort(np.argsort(values, axis=1), axis=1) for values in (full, proxy)]
    counts, *_ = np.histogram2d(ranks[1].ravel(), ranks[0].ravel(), bins=full.shape[1])
    right.imshow(counts, origin="lower", cmap="Blues")
    right.set(xlabel="rank in prompt, full", ylabel="rank in prompt, preview", title="ranks, all prompts")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="", help="folder of another pipeline than the shipped one")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    overrides = [f"model.path={arguments.model}"] if arguments.model else []
    config = load([ROOT / "configs" / "demo.yaml"], overrides)
    with torch.no_grad():
        result = measure(Bench(config, arguments.prompts, arguments.seeds), config)
    proxies = result.pop("_proxies")
    arguments.out.mkdir(parents=True, exist_ok=True)
    plot(proxies["proxy"], proxies["full"], arguments.out / "testbed_fidelity.png")
    result |= {"model": config.model.path, "prompts": arguments.prompts, "seeds": arguments.seeds}
    (arguments.out / "testbed_fidelity.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

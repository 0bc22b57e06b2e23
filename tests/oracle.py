"""The oracle: a whole Sol-RL run in one file and one process, to be read from top to bottom.

It states once more, in the plainest code that has the same bits, what the package computes with actors,
leases, heaps, fused quantisers, PEFT and DeepSpeed. From the package it takes only what has known answers of
its own: records, addressed noise, loading of models and rewards, the NVFP4 quantiser, formats of digests.

    choose prompts ─► explore (NVFP4) ─► best and worst K/2 ─► regenerate ─► NFT update ─► next revision

Bits depend on the number of threads: every stage has that of the actor that would do it. CPU, float32 base.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from solrl_ray import models, rewards
from solrl_ray.config.schema import Config
from solrl_ray.models.base import DiffusionModel
from solrl_ray.policy.digest import lora_digest
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.quantization import nvfp4
from solrl_ray.records import Address, Candidate, Prompt, PromptEmbedding, Selection
from solrl_ray.rollout.selection import selection_digest
from solrl_ray.sampling.noise import initial_noise, permutation, standard_normal

Factors = dict[str, Tensor]
Embeddings = Mapping[str, PromptEmbedding]
Row = tuple["Sample", float, float]
"""A sample, its advantage and its weight."""


def add(tensors: Sequence[Tensor]) -> Tensor:
    """From left to right."""
    return reduce(torch.add, tensors)


@dataclass(frozen=True)
class Sample:
    """A regenerated image, as the learner sees it."""

    prompt_id: str
    index: int
    x0: Tensor
    reward: float


@dataclass
class OracleResult:
    selection_digest: str = ""
    lora_digest: str = ""
    selections: list[dict[str, Selection]] = field(default_factory=list)
    rewards: list[dict[str, list[float]]] = field(default_factory=list)
    """Both per iteration, by prompt id; full-precision rewards in the order of the selection."""


def run(config: Config, *, iterations: int) -> OracleResult:
    """Train for `iterations` and say what was selected and what was learned."""
    base = models.load(config.model, "cpu", components={"text", "transformer", "vae"})
    score = rewards.load(config.rewards, "cpu").score
    prompts = read_prompts(config.prompts.train)
    learner = Learner(config, base)
    before = learner.old
    result, digests, rollout = OracleResult(), "", config.rollout
    for iteration in range(iterations):
        order = permutation(address(config, "prompts", iteration), len(prompts))
        chosen = [prompts[i] for i in order[: rollout.prompts]]
        embeddings = embed(base, chosen)
        quantised = rollout.explore.precision == "nvfp4-emulated"
        weights = (before if rollout.max_staleness else learner.old, quantised), (learner.old, False)
        explorer, regenerator = (sampling_model(config, base, factors, quant) for factors, quant in weights)
        selections, samples = {}, []
        for prompt in chosen:
            torch.set_num_threads(config.fleet.explorers.threads)
            pool = [address(config, "initial-noise", iteration, (prompt.id, i)) for i in range(rollout.pool)]
            embedding = embeddings[prompt.id]
            proxy = explore(config, explorer, score, prompt.text, embedding, pool)
            selections[prompt.id] = select(iteration, prompt.id, proxy, rollout.keep)
            torch.set_num_threads(config.fleet.regenerators.threads)
            kept = [candidate.index for candidate in selections[prompt.id].chosen]
            again = [pool[i] for i in kept]
            x0, full = draw(config, rollout.regenerate, regenerator, score, prompt.text, embedding, again)
            samples += [Sample(prompt.id, i, x, r) for i, x, r in zip(kept, x0, full, strict=True)]
        torch.set_num_threads(config.fleet.learners.threads)
        before = learner.old
        learner.update(iteration, samples, embeddings)
        digests += f"{selection_digest(selections.values())}\n"
        result.selections.append(selections)
        result.rewards.append({p.id: [s.reward for s in samples if s.prompt_id == p.id] for p in chosen})
    result.selection_digest = hashlib.sha256(digests.encode()).hexdigest()
    result.lora_digest = lora_digest(learner.default)
    return result


def address(config: Config, purpose: str, iteration: int, sample: Any = None, step: int = 0) -> Address:
    """`sample` is a (prompt id, index)."""
    where: dict[str, Any] = {} if sample is None else {"prompt_id": sample[0], "index": sample[1]}
    return Address(run_seed=config.run.seed, purpose=purpose, iteration=iteration, step=step, **where)


# ---- Sampling: noise levels, solver, picture, reward, choice -----------------------------------------------


def embed(model: DiffusionModel, prompts: Sequence[Prompt]) -> dict[str, PromptEmbedding]:
    torch.set_num_threads(1)
    tensors = {p.id: model.encode([p.text])[0] for p in prompts}
    return {key: PromptEmbedding(prompt_id=key, tensors=value, digest=key) for key, value in tensors.items()}


def noise_levels(config: Config, model: DiffusionModel, steps: int) -> list[float]:
    """From 1 to 0, steps + 1 of them; FLUX shifts them towards 1, the more the longer the image sequence."""
    schedule = config.model.schedule
    end, points = (0.0, steps + 1) if schedule.kind == "linear" else (1.0 / steps, steps)
    grid = [1.0 + (end - 1.0) * (i / max(points - 1, 1)) for i in range(points)]
    if schedule.kind == "linear":
        return grid
    assert schedule.kind == "flux"
    slope = (schedule.max_shift - schedule.base_shift) / (schedule.max_tokens - schedule.base_tokens)
    shift = math.exp(schedule.base_shift + slope * (model.image_tokens - schedule.base_tokens))
    return [shift * s / (1.0 + (shift - 1.0) * s) for s in grid] + [0.0]


@torch.no_grad()
def draw(
    config: Config, stage: Any, model: DiffusionModel, score: Any, text: str, embedding: Any, seeds: Any
) -> tuple[list[Tensor], list[float]]:
    """Clean latents and rewards."""
    noise = list(initial_noise(seeds, model.latent_shape))
    latents, _ = steps(config, stage, model, embedding, noise, noise, range(stage.steps))
    return latents, scores(stage, model, score, text, latents)


@torch.no_grad()
def explore(
    config: Config, model: DiffusionModel, score: Any, text: str, embedding: Any, seeds: Any
) -> dict[int, float]:
    """Rewards by index of the previews that are finished."""
    stage, prune = config.rollout.explore, config.rollout.preview.prune
    if prune is None:
        return dict(enumerate(draw(config, stage, model, score, text, embedding, seeds)[1]))
    unit, found = config.rollout.preview.unit or len(seeds), {}
    keep = prune.keep * unit // len(seeds)
    for first in range(0, len(seeds), unit):
        z = list(initial_noise(seeds[first : first + unit], model.latent_shape))
        z, estimates = steps(config, stage, model, embedding, z, z, range(prune.after))
        early = scores(stage, model, score, text, estimates)
        ranked = sorted(range(unit), key=lambda i: (-early[i], i))
        kept = sorted(ranked[: keep // 2] + ranked[-keep // 2 :])
        rest = range(prune.after, stage.steps)
        ends, _ = steps(config, stage, model, embedding, [z[i] for i in kept], [estimates[i] for i in kept], rest)
        found |= {first + i: r for i, r in zip(kept, scores(stage, model, score, text, ends), strict=True)}
    return found


def batches(rows: Sequence[Tensor], size: int) -> Iterator[Tensor]:
    """Micro-batches; the last one is filled by repetition."""
    filled = [*rows, *[rows[-1]] * (-len(rows) % size)]
    return (torch.stack(filled[start : start + size]) for start in range(0, len(filled), size))


def steps(
    config: Config, stage: Any, model: DiffusionModel, embedding: Any, z: Any, previous: Any, which: range
) -> tuple[list[Tensor], list[Tensor]]:
    """Latents after these steps, and the last one's estimates of x0; `previous` are those of the step before."""
    latents, estimates, size = [], [], stage.micro_batch
    batch, grid = model.batch_embeddings([embedding] * size), noise_levels(config, model, stage.steps)
    for x, before in zip(batches(z, size), batches(previous, size), strict=True):
        for k in which:
            s, s_next = grid[k], grid[k + 1]
            v = model.velocity(x, s, batch)
            x0 = estimate = x - s * v
            if config.rollout.solver == "euler":
                x = x + (s_next - s) * v
            else:  # DPM-Solver++(2M); its first, second and last steps are Euler's
                if 2 <= k < len(grid) - 2:
                    lower, here, after = (math.log(1 - t) - math.log(t) for t in grid[k - 1 : k + 2])
                    estimate = x0 + (after - here) / (2 * (here - lower)) * (x0 - before)
                x = s_next / s * x + (1 - s_next / s) * estimate
            before = x0
        latents += list(x)
        estimates += list(before)
    return latents[: len(z)], estimates[: len(z)]


def scores(stage: Any, model: DiffusionModel, score: Any, text: str, latents: Any) -> list[float]:
    size, found = stage.micro_batch, []
    for batch in batches(latents, size):
        found += score(model.decode(batch), [text] * size).tolist()
    return found[: len(latents)]


def select(iteration: int, prompt_id: str, proxy: Mapping[int, float], keep: int) -> Selection:
    """The best in falling, the worst in rising order; of equal rewards the smaller index is the better."""
    ranked = sorted(proxy, key=lambda i: (-proxy[i], i))
    order = [Candidate(prompt_id=prompt_id, index=i, reward=proxy[i]) for i in ranked]
    sides = {"top": tuple(order[: keep // 2]), "bottom": tuple(order[::-1][: keep - keep // 2])}
    return Selection(iteration=iteration, revision=iteration, prompt_id=prompt_id, **sides)


# ---- What sampling computes with: merged weights, quantised weights ----------------------------------------


def replace_linears(model: nn.Module, new: Any) -> None:
    """Put ``new(path, linear)`` in the place of every linear for which it is not None."""
    for path, layer in list(model.named_modules()):
        parent, _, leaf = path.rpartition(".")
        made = new(path, layer) if isinstance(layer, nn.Linear) else None
        if made is not None:
            setattr(model.get_submodule(parent), leaf, made)


def has_lora(config: Config, path: str) -> bool:
    return any(path == target or path.endswith(f".{target}") for target in config.model.lora.targets)


def sampling_model(config: Config, base: DiffusionModel, factors: Factors, quant: bool) -> DiffusionModel:
    """LoRA merged into the weights and rounded once; for explorers, NVFP4 of bfloat16 inside the scope."""
    scope, scaling = config.model.quantization, config.model.lora.alpha / config.model.lora.rank

    def merged(path: str, weight: Tensor) -> Tensor:
        """float64; products of float32 numbers are exact in it, and the sum over the rank has its order."""
        total = torch.zeros(weight.shape, dtype=torch.float64)
        a, b = factors[f"{path}.lora_A"].double(), factors[f"{path}.lora_B"].double()
        for r in range(len(a)):
            total += b[:, r : r + 1] * a[r : r + 1]
        return total * scaling + weight.double()

    def new(path: str, layer: nn.Linear) -> nn.Module | None:
        skip = any(path.startswith(part[1:]) if part[0] == "^" else part in path for part in scope.skip)
        if not quant or skip or max(layer.weight.shape) <= scope.min_features:
            if has_lora(config, path):
                layer.weight.data = merged(path, layer.weight).float()
            return None
        weight = layer.weight.detach().bfloat16()
        amax = float(1.5 * weight.float().abs().max())  # the base's, for every revision
        if has_lora(config, path):
            weight = to_bfloat16(merged(path, weight))
        while amax < float(weight.float().abs().max()):
            amax *= 2
        return NVFP4Linear(weight.float(), amax, layer.bias)

    model = copy.deepcopy(base)
    replace_linears(model.transformer, new)
    return model


def to_bfloat16(x: Tensor) -> Tensor:
    """float64 → bfloat16 in one rounding: a float32 on a tie first steps to the side on which x lies."""
    y = x.float()
    tie = (y.view(torch.int32) & 0xFFFF == 0x8000) & (y.double() != x)
    side = torch.where(x > y.double(), math.inf, -math.inf).float()
    return torch.where(tie, torch.nextafter(y, side), y).bfloat16()


class NVFP4Linear(nn.Module):
    """Both operands are quantised; their global scales are applied to the float32 product."""

    def __init__(self, weight: Tensor, amax: float, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = nvfp4.quantize(nvfp4.pad_columns(weight), amax), bias

    def forward(self, x: Tensor) -> Tensor:
        activation = nvfp4.quantize(nvfp4.pad_columns(x.reshape(-1, x.shape[-1])))
        product = activation.operand() @ self.weight.operand().t()
        alpha = float(activation.amax * self.weight.amax * nvfp4.ALPHA_UNIT)
        product = product * alpha if self.bias is None else torch.add(self.bias, product, alpha=alpha)
        return product.view(*x.shape[:-1], -1)


# ---- The update: advantages, DiffusionNFT, ranks, AdamW, decay ---------------------------------------------


class LoraLinear(nn.Module):
    """y = W x + scaling B A x; without factors the base."""

    def __init__(self, layer: nn.Linear, scaling: float) -> None:
        super().__init__()
        self.layer, self.scaling = layer, scaling
        self.factors: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.factors is None:
            return self.layer(x)
        return self.layer(x) + linear(linear(x, self.factors[0]), self.factors[1]) * self.scaling


class Learner:
    """All ranks at once. Flat vectors hold the factors in order of their names."""

    def __init__(self, config: Config, base: DiffusionModel) -> None:
        self.config, self.model, self.updates = config, copy.deepcopy(base), 0
        lora, factors = config.model.lora, {}

        def new(path: str, layer: nn.Linear) -> nn.Module | None:
            """A gaussian with standard deviation 1 / rank, B zero."""
            if not has_lora(config, path):
                return None
            seed, shape = address(config, "lora-init", 0, (path, 0)), (lora.rank, layer.in_features)
            factors[f"{path}.lora_A"] = torch.from_numpy(standard_normal(seed, shape)) / lora.rank
            factors[f"{path}.lora_B"] = torch.zeros(layer.out_features, lora.rank)
            return LoraLinear(layer, lora.alpha / lora.rank)

        replace_linears(self.model.transformer, new)
        self.default = self.old = self.ema = dict(sorted(factors.items()))
        self.exp_avg = self.exp_avg_sq = torch.zeros(sum(f.numel() for f in factors.values()))

    def named(self, flat: Tensor) -> Factors:
        """A flat vector as factors."""
        pieces = flat.split([f.numel() for f in self.default.values()])
        return {name: x.view(f.shape) for (name, f), x in zip(self.default.items(), pieces, strict=True)}

    def update(self, iteration: int, samples: Sequence[Sample], embeddings: Embeddings) -> None:
        """Micro-batch i, of consecutive samples, goes to rank i % world_size; fillers weigh 0."""
        size, ranks = self.config.learner.micro_batch, self.config.learner.world_size
        trained = {name: factor.clone().requires_grad_() for name, factor in self.default.items()}
        gains = advantages(self.config, samples)
        rows = [(s, a, 1.0) for s, a in zip(samples, gains, strict=True)]
        rows += [(samples[-1], gains[-1], 0.0)] * (-len(rows) % (size * ranks))
        passes: list[list[Tensor]] = [[] for _ in range(ranks)]
        for i in range(len(rows) // size):
            batch = rows[i * size : (i + 1) * size]
            for loss in self.losses(iteration, batch, len(samples), trained, embeddings):
                gradient = torch.autograd.grad(loss, list(trained.values()))
                passes[i % ranks].append(torch.cat([g.flatten() for g in gradient]))
        self.updates += 1
        self.adamw(add([add(mine) / ranks for mine in passes]))  # each rank adds up its passes, ranks are averaged once
        self.follow()

    def losses(
        self, iteration: int, rows: list[Row], count: int, trained: Factors, embeddings: Embeddings
    ) -> Iterator[Tensor]:
        """Losses of the passes over a micro-batch. Averaged over ranks, all add up to the mean loss."""
        config, o = self.config, self.config.objective
        samples = [(s.prompt_id, s.index) for s, _, _ in rows]
        grid = noise_levels(config, self.model, config.rollout.regenerate.steps)[:-1]
        timesteps = max(1, int(Decimal(repr(o.timestep_fraction)) * len(grid)))
        orders = [permutation(address(config, "timesteps", iteration, s), len(grid)) for s in samples]
        embedding = self.model.batch_embeddings([embeddings[prompt_id] for prompt_id, _ in samples])
        x0 = torch.stack([s.x0 for s, _, _ in rows])
        weights = torch.tensor([weight for _, _, weight in rows])
        a = torch.tensor([gain for _, gain, _ in rows], dtype=torch.float64)
        clip = o.advantage.clip
        r = (a.clamp(-clip, clip) / (2 * clip) + 0.5).float()
        for j in range(timesteps):
            steps = [int(order[j]) for order in orders]
            where = zip(samples, steps, strict=True)
            seeds = [address(config, "training-noise", iteration, s, k) for s, k in where]
            t = torch.tensor([grid[k] for k in steps])[:, None, None]
            x_t = (1 - t) * x0 + t * initial_noise(seeds, self.model.latent_shape)
            with torch.no_grad():
                v_old, v_ref = (self.velocity(f, x_t, t, embedding) for f in (self.old, None))
            v = self.velocity(trained, x_t, t, embedding)
            positive = weighted_error(x_t - t * (o.beta * v + (1 - o.beta) * v_old), x0)
            negative = weighted_error(x_t - t * ((1 + o.beta) * v_old - o.beta * v), x0)
            loss = clip / o.beta * (r * positive + (1 - r) * negative) + o.kl * mean(torch.square(v - v_ref))
            yield (loss * weights).sum() * (1.0 / (count * timesteps) * config.learner.world_size)

    def velocity(self, factors: Factors | None, x_t: Tensor, t: Tensor, embedding: Any) -> Tensor:
        for path, m in self.model.transformer.named_modules():
            if isinstance(m, LoraLinear):
                both = None if factors is None else (factors[f"{path}.lora_A"], factors[f"{path}.lora_B"])
                m.factors = both
        return self.model.velocity(x_t, t.flatten(), embedding)

    def adamw(self, gradient: Tensor) -> None:
        """Every rank clips and steps its slice of the flat vector; slices have one, even length."""
        o, ranks, step = self.config.learner.optimizer, self.config.learner.world_size, self.updates
        beta1, beta2 = o.betas
        flat = torch.cat([factor.flatten() for factor in self.default.values()])
        length = -(-len(flat) // (2 * ranks)) * 2
        vectors = (gradient, flat, self.exp_avg, self.exp_avg_sq)
        slices = [pad(x, (0, length * ranks - len(flat))).split(length) for x in vectors]
        scale, pieces = self.clip_scale(gradient, length), []
        for g, p, m, v in zip(*slices, strict=True):
            g, p = g * scale, p * (1 - o.lr * o.weight_decay)
            m, v = m.lerp(g, 1 - beta1), (v * beta2).addcmul(g, g, value=1 - beta2)
            root = v.sqrt() / (1 - beta2**step) ** 0.5 + o.eps
            pieces.append((p.addcdiv(m, root, value=-o.lr / (1 - beta1**step)), m, v))
        flat, self.exp_avg, self.exp_avg_sq = (torch.cat(x)[: len(flat)] for x in zip(*pieces, strict=True))
        self.default = self.named(flat)

    def clip_scale(self, gradient: Tensor, length: int) -> Tensor | float:
        """1 / max(1, norm / limit); float64 norms of each factor in each slice, squares added in float32."""
        limit = self.config.learner.gradient_clip
        squares: dict[int, list[Tensor]] = {}
        start = 0
        for factor in self.default.values():
            end = start + factor.numel()
            while start < end:
                cut = min(end, (start // length + 1) * length)
                norm = torch.linalg.vector_norm(gradient[start:cut].double())
                squares.setdefault(start // length, []).append(norm.square())
                start = cut
        norm = add([torch.stack(own).sum().float() for own in squares.values()]).sqrt()
        return 1.0 if limit == 0 else 1.0 / torch.clamp((norm + 1e-6) / limit, min=1.0)

    def follow(self) -> None:
        """EMA and sampling policy after an update."""
        s, decay = self.updates, self.config.objective.old_decay
        e = min((1 + s) / (10 + s), self.config.learner.ema_cap)
        d = 0.0 if decay.kind == "copy" else min(decay.slope * s, decay.cap)
        self.ema = {name: f + (self.default[name] - f) * (1.0 - e) for name, f in self.ema.items()}
        self.old = {name: f * d + self.default[name] * (1.0 - d) for name, f in self.old.items()}


def advantages(config: Config, samples: Sequence[Sample]) -> list[float]:
    """(R - mean of the prompt) / (std + 1e-4) in float64, all sums exact."""

    def average(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)

    def std(values: Sequence[float]) -> float:
        return math.sqrt(average([(v - average(values)) * (v - average(values)) for v in values]))

    kind, everyone, gains = config.objective.advantage.std, [s.reward for s in samples], []
    for s in samples:
        group = [other.reward for other in samples if other.prompt_id == s.prompt_id]
        divisor = 1.0 if kind == "none" else std(everyone if kind == "global" else group) + 1e-4
        gains.append((s.reward - average(group)) / divisor)
    return gains


def weighted_error(x0_hat: Tensor, x0: Tensor) -> Tensor:
    """mean (x0_hat - x0)² / max(mean |x0_hat - x0|, 1e-5), without gradient through the weight."""
    error = x0_hat - x0
    return mean(torch.square(error)) / mean(error.detach().double().abs()).clamp(min=1e-5).float()


def mean(x: Tensor) -> Tensor:
    return x.flatten(1).mean(dim=1)

"""The arithmetic of a run, worked out from its configuration and printed before it starts (design law 9).

    prompts × N candidates ──► units of the pools ──► prompts × K samples ──► micro-batches ──► optimiser steps

"Forward" means one call of the transformer on a whole micro-batch; both solvers need one call a step.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass

from solrl_ray.config.samplers import Ode
from solrl_ray.config.schema import Config, Worker
from solrl_ray.config.strategies import is_one_stage, pool_sampling, previews
from solrl_ray.config.update import (
    FLOAT32_BYTES,
    forwards_without_gradient,
    latents_a_sample,
    prepared_bytes,
    references,
    trained_timesteps,
    training_bytes,
)

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What only the model's own files can tell; see `solrl_ray.cli.preflight.model_facts`."""

    latent_shape: tuple[int, ...]
    """Shape of one sample's latent."""
    parameters: int
    """Parameters of the transformer, LoRA not counted."""
    lora_modules: int
    """Linears that receive LoRA factors."""
    lora_parameters: int
    """Parameters of one adapter."""
    packed_bytes: int
    """Codes and scales of the linears that are both adapted and quantised; 0 if nothing is."""
    packed_tiers: tuple[str, ...] = ()
    """In which tiers they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Counts for one iteration unless a name says otherwise; bytes are sizes of tensors, without headers."""

    config: Config
    facts: ModelFacts | None
    candidates: int
    explore_units: int
    """Units of the pools, whose candidates are previews or, in one stage, the samples themselves."""
    explore_forwards: int
    samples: int
    regenerate_units: int
    regenerate_forwards: int
    padded_images: int
    """Images that fill up the last regeneration micro-batch of each prompt and are thrown away."""
    trained_timesteps: int
    micro_batches: int
    """Learner micro-batches a rank, of all optimiser steps, each trained on at every trained timestep."""
    padded_samples: int
    """Repetitions of weight 0 that fill up the ranks' last micro-batches."""
    forwards_without_gradient: int
    """A rank's forwards for v_reference, with a KL term, for v_anchor, and for v_old, unless the sampling policy is a
    copy of the trained one: then v_old is v_theta until the first optimiser step of the iteration."""
    backwards: int
    """A rank's forward-and-backward passes."""
    evaluations: tuple[int, ...]
    """Updates done when the held-out prompts are drawn."""
    evaluation_images: int
    """Images of one evaluation."""
    latents_bytes: int | None
    """Samples of one iteration, with the trajectories of objectives that need them."""
    pool_bytes: int | None
    """Latents and trajectories of one prompt's pool, which a strategy of one stage keeps until the prompt's
    selection."""
    lora_bytes: int | None
    """One adapter's factors in float32."""
    packed_bytes: int | None
    weights_bytes: int | None
    """The transformer's, as every explorer, regenerator and learner rank holds them."""
    training_bytes: int | None
    """A learner rank's LoRA policies and gradient, and its share of what AdamW keeps: a copy of the factors and two
    moments, all in float32."""
    prepared_bytes: int | None
    """The most that a learner rank keeps in main memory of micro-batches that wait for their gradient while samples
    come in: see `update.prepared_bytes`."""
    train_prompts: int | None
    heldout_prompts: int | None

    @property
    def revision_bytes(self) -> int | None:
        if self.lora_bytes is None or self.packed_bytes is None:
            return None
        return self.lora_bytes + self.packed_bytes

    @property
    def cpus(self) -> float:
        """CPUs that the actors reserve with Ray."""
        return sum(count * worker.num_cpus for _, count, worker in _workers(self.config))

    @property
    def gpus(self) -> float:
        return sum(count * worker.num_gpus for _, count, worker in _workers(self.config))

    @property
    def threads(self) -> int:
        """Compute threads of all actors together."""
        return sum(count * worker.threads for _, count, worker in _workers(self.config))

    def rows(self) -> list[tuple[str, str]]:
        """What `table` prints: name of the stage, its sum in words."""
        config, learner = self.config, self.config.learner
        rows = [
            (
                "run",
                f"{config.run.name} · {config.run.iterations} iterations, "
                f"{'one policy update' if learner.updates == 1 else f'{learner.updates} policy updates'} each "
                f"· seed {config.run.seed}",
            ),
            ("model", self._model()),
            ("prompts", self._prompts()),
            *self._rollout(),
            (
                "learn",
                f"{self.samples:,} samples × {self.trained_timesteps} timestep{_s(self.trained_timesteps)} "
                f"on {learner.world_size} rank{_s(learner.world_size)} "
                f"· {self.micro_batches} micro-batches of {learner.micro_batch} a rank: "
                f"{self.forwards_without_gradient:,} forwards{self._targets()}, "
                f"{self.backwards:,} forwards with backward, {learner.updates} optimiser step{_s(learner.updates)} "
                f"on {config.objective.kind}"
                + (f", {self.padded_samples} samples of padding" if self.padded_samples else ""),
            ),
            ("publish", self._publish()),
            (
                "evaluate",
                f"{config.evaluation.prompts} prompts × {config.evaluation.samples} samples "
                f"× {config.evaluation.steps} steps = {self.evaluation_images:,} images, "
                f"after {_list(self.evaluations)} updates",
            ),
            ("fleet", self._fleet()),
            ("memory", self._memory()),
            (
                "whole run",
                f"{self.candidates * config.run.iterations:,} candidates, "
                f"{self.samples * config.run.iterations:,} samples, {config.run.iterations * learner.updates} updates",
            ),
            ("time", "shown after the first iteration, by its pace"),
        ]
        return [(name, text) for name, text in rows if text]

    def table(self, width: int = 100, *, without: str = "") -> str:
        """The printed arithmetic: one paragraph a stage, wrapped at `width` columns; `without` the row of that name."""
        return paragraphs([row for row in self.rows() if row[0] != without], width)

    def _rollout(self) -> list[tuple[str, str]]:
        """How candidates become samples, by strategy."""
        config, rollout, pool = self.config, self.config.rollout, pool_sampling(self.config)
        one_stage = is_one_stage(config)
        sampled = (
            f"{rollout.prompts} prompts × {rollout.pool} seeds = {self.candidates:,} candidates "
            f"× {pool.steps} steps ({_sampler(config)}, {pool.tier}) "
            f"· {self.explore_units} units of {pool.micro_batch}, {self.explore_forwards:,} forwards"
        )
        half = rollout.keep // 2
        chosen = f"{rollout.keep} of {rollout.pool} seeds a prompt: {half} best and {half} worst"
        if rollout.strategy == "direct":
            chosen = f"every seed, {rollout.keep} a prompt"
        if one_stage:
            kept = f" · {_size(self.pool_bytes)} of pool kept until its selection" if self.pool_bytes else ""
            return [
                ("sample", f"{sampled}{kept}"),
                ("select", f"{chosen}; {self.samples:,} samples, trained on as they are"),
            ]
        regenerated = (
            f"{self.samples:,} samples × {rollout.regenerate.steps} steps ({config.model.dtype}) "
            f"· {self.regenerate_units} units of {rollout.regenerate.micro_batch}, {self.regenerate_forwards:,} "
            "forwards" + (f", {self.padded_images} images of padding" if self.padded_images else "")
        )
        rows = [("explore", sampled), ("select", chosen), ("regenerate", regenerated)]
        fidelity = config.fidelity
        if fidelity.audit_prompts:
            seeds = f"{fidelity.audit_seeds} unselected seeds of {fidelity.audit_prompts} prompts"
            rows.append(("audit", f"{seeds}, regenerated to measure the ranking, never trained on"))
        if fidelity.floor is not None:
            drawn = ", then ".join(f"{p.steps} steps ({p.precision})" for p in previews(self.config)[1:])
            low = f"{fidelity.measure} below {fidelity.floor:g} for {fidelity.patience} iterations running"
            rows.append(("fall back", f"if {low}: previews of {drawn}"))
        return rows

    def _model(self) -> str:
        model = self.config.model
        text = f"{model.path} · {model.resolution} px · LoRA rank {model.lora.rank}, alpha {model.lora.alpha:g}"
        if self.facts is None:
            return text
        return (
            f"{text} on {self.facts.lora_modules} linears = {self.facts.lora_parameters:,} trained "
            f"of {self.facts.parameters:,} parameters"
        )

    def _prompts(self) -> str:
        if self.train_prompts is None or self.heldout_prompts is None:
            return ""
        return f"{self.train_prompts:,} to train on, {self.heldout_prompts:,} held out"

    def _publish(self) -> str:
        if self.revision_bytes is None or self.lora_bytes is None or self.packed_bytes is None:
            return ""
        latents = f" · samples to the learner {_size(self.latents_bytes or 0)}"
        assert self.facts is not None
        packed = f" and packed weights {_size(self.packed_bytes)} ({', '.join(self.facts.packed_tiers)})"
        return (
            f"revision of {_size(self.revision_bytes)}: LoRA factors {_size(self.lora_bytes)} in float32"
            f"{packed if self.packed_bytes else ''}{latents}"
        )

    def _targets(self) -> str:
        """What the forwards without gradient are for."""
        kinds = [f"v_{name}" for name in references(self.config)]
        copied = self.config.objective.old_decay.kind == "copy"
        where = " in the first optimiser step" if copied and self.config.learner.updates > 1 else ""
        same = f"; v_old is v_theta{where}" if copied else ""
        return f" ({' and '.join(kinds) or 'none needed'}{same})"

    def _memory(self) -> str:
        """What is certain; the rest depends on libraries and allocators."""
        if self.weights_bytes is None or self.training_bytes is None or self.latents_bytes is None:
            return ""
        workers = sum(count for _, count, _ in _workers(self.config))
        waiting = ""
        if self.prepared_bytes:
            waiting = f", and in main memory {_size(self.prepared_bytes)} of what waits for its gradient"
        return (
            f"{_size(self.weights_bytes)} of transformer weights ({self.config.model.dtype}) on each of "
            f"{workers} workers · {_size(self.training_bytes)} of LoRA policies, gradient and AdamW state on each "
            f"learner rank{waiting} · {_size(self.latents_bytes)} of samples an iteration · not counted: packed "
            "previews, activations, text encoders, autoencoder, rewards"
        )

    def _fleet(self) -> str:
        parts = [
            f"{count} {name}{_s(count)} × {worker.threads} thread{_s(worker.threads)}{_gpus(worker)}"
            for name, count, worker in _workers(self.config)
        ]
        counts = {"CPU": self.cpus, "GPU": self.gpus}
        asked = " and ".join(f"{count:g} {name}{_s(count)}" for name, count in counts.items() if count) or "nothing"
        return f"{', '.join(parts)} · {asked} reserved"


def paragraphs(rows: list[tuple[str, str]], width: int = 100) -> str:
    """Names in a column, each with its text wrapped at `width` columns beside it."""
    column = max(len(name) for name, _ in rows) + 2
    return "\n".join(
        textwrap.fill(
            text,
            width=width,
            initial_indent=name.ljust(column),
            subsequent_indent=" " * column,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, text in rows
    )


def _workers(config: Config) -> tuple[tuple[str, int, Worker], ...]:
    fleet = config.fleet
    return (
        ("explorer", fleet.explorers.count, fleet.explorers),
        *((f"{other.name} explorer", other.count, other) for other in fleet.other_explorers),
        ("regenerator", fleet.regenerators.count, fleet.regenerators),
        ("learner", config.learner.world_size, fleet.learners),
    )


def _sampler(config: Config) -> str:
    sampler = config.rollout.sampler
    return config.rollout.solver if isinstance(sampler, Ode) else sampler.kind


def evaluation_points(config: Config) -> tuple[int, ...]:
    """After how many updates the policy is evaluated, rising: 0, every `evaluation.every`, the last."""
    last, every = config.run.iterations, config.evaluation.every
    between = range(every, last, every) if every else ()
    return (0, *between, last)


def describe(
    config: Config,
    facts: ModelFacts | None = None,
    *,
    train_prompts: int | None = None,
    heldout_prompts: int | None = None,
) -> Arithmetic:
    """Work out the counts of a run. Pure.

    `facts` and the numbers of prompts come from files; without them the lines that need them are left out.
    The configuration must have passed `checks.check`.
    """
    rollout, learner = config.rollout, config.learner
    pool, one_stage = pool_sampling(config), is_one_stage(config)
    units_per_prompt = 0 if one_stage else math.ceil(rollout.keep / rollout.regenerate.micro_batch)
    samples = rollout.prompts * rollout.keep
    slots = learner.world_size * learner.micro_batch
    micro_batches = learner.updates * math.ceil(samples / learner.updates / slots)
    backwards = micro_batches * trained_timesteps(config)
    explore_units = rollout.prompts * (rollout.pool // pool.micro_batch)
    return Arithmetic(
        config=config,
        facts=facts,
        candidates=rollout.prompts * rollout.pool,
        explore_units=explore_units,
        explore_forwards=explore_units * pool.steps,
        samples=samples,
        regenerate_units=rollout.prompts * units_per_prompt,
        regenerate_forwards=rollout.prompts * units_per_prompt * rollout.regenerate.steps,
        padded_images=0
        if one_stage
        else rollout.prompts * (units_per_prompt * rollout.regenerate.micro_batch - rollout.keep),
        trained_timesteps=trained_timesteps(config),
        micro_batches=micro_batches,
        padded_samples=micro_batches * slots - samples,
        forwards_without_gradient=forwards_without_gradient(config, backwards),
        backwards=backwards,
        evaluations=evaluation_points(config),
        evaluation_images=config.evaluation.prompts * config.evaluation.samples,
        latents_bytes=samples * latents_a_sample(config) * math.prod(facts.latent_shape) * FLOAT32_BYTES
        if facts
        else None,
        pool_bytes=rollout.pool * latents_a_sample(config) * math.prod(facts.latent_shape) * FLOAT32_BYTES
        if facts and one_stage
        else None,
        lora_bytes=facts.lora_parameters * FLOAT32_BYTES if facts else None,
        packed_bytes=facts.packed_bytes * (config.publish.mode == "packed") if facts else None,
        weights_bytes=facts.parameters * DTYPE_BYTES[config.model.dtype] if facts else None,
        training_bytes=training_bytes(config, facts.lora_parameters) if facts else None,
        prepared_bytes=prepared_bytes(config, facts.latent_shape) if facts else None,
        train_prompts=train_prompts,
        heldout_prompts=heldout_prompts,
    )


def _s(count: float) -> str:
    return "" if f"{count:g}" == "1" else "s"


def _gpus(worker: Worker) -> str:
    return f" and {worker.num_gpus:g} GPU{_s(max(1.0, worker.num_gpus))}" if worker.num_gpus else ""


def _list(numbers: tuple[int, ...]) -> str:
    words = [str(number) for number in numbers]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _size(count: int) -> str:
    """Bytes in decimal units, as disks and networks count."""
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"

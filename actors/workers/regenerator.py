"""A regenerator: replays chosen seeds in full precision and scores them again. Only its samples are learned from."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from actors.cluster.rpc import Callee
from actors.workers.devices import free_cache, prepare
from actors.workers.loaded_policy import LoadedPolicy
from solrl_ray import models, rewards
from solrl_ray.config.checks import needs_trajectory
from solrl_ray.config.samplers import Ode
from solrl_ray.config.schema import Config
from solrl_ray.evaluation.held_out import reference_pictures
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.compilation import compile_, compile_decoder, what_compiles
from solrl_ray.quantization import attestation
from solrl_ray.quantization.scope import quantize_
from solrl_ray.records import Attestation, Prompt, PromptEmbedding, Receipt, Refusal, SampleGroup, UnitResult, WorkUnit
from solrl_ray.rewards.base import Reward
from solrl_ray.rewards.columns import Columns
from solrl_ray.rollout.sampler import Sampler, scored
from solrl_ray.weight_sync.container import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """The small part of a regenerated group, for the controller."""

    prompt_id: str
    rewards: tuple[float, ...]
    seconds: float
    started: float
    """Seconds since 1970, by the worker's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    unit: WorkUnit
    rewards: tuple[float, ...]
    images: torch.Tensor | None
    """float32 [n, 3, H, W] in [0, 1]; None unless they were asked for."""
    seconds: float
    started: float
    """Seconds since 1970, by the worker's clock."""
    columns: tuple[tuple[float, ...], ...] = ()
    """Scores by each of several rewards, if the worker has them apart."""


class Regenerator(Callee):
    def __init__(self, name: str, config: Config) -> None:
        self._name = name
        self._config = config
        self._outside: _Outside | None = None

    def __repr__(self) -> str:
        """What Ray shows in its dashboard and before each line that this process logs."""
        return f"{self._name} samples in {self._config.model.dtype}"

    def start(self) -> Attestation:
        """Build the model and say what really runs (design law 5). Not in the constructor: see `Explorer.start`."""
        config = self._config
        worker, stage = config.fleet.regenerators, config.rollout.regenerate
        self._device = prepare(worker, deterministic=config.run.deterministic)
        model = models.load(config.model, self._device, components={"transformer", "vae"})
        self._model = model
        self._reward = self._load_reward()
        tier = "bf16" if config.model.dtype == "bfloat16" else "float32"
        report = quantize_(model.transformer, tier, config.model.quantization)
        checks = attestation.attest(model.transformer, tier, report)
        checks["compiled"] = compile_(model.transformer, config.compile, self._device, tier)
        checks["decoder compiled"] = compile_decoder(model.decoder, config.compile, self._device)
        compiled = what_compiles(checks["compiled"], checks["decoder compiled"])
        self._score_class = attestation.score_class(
            self._device,
            tier,
            micro_batch=stage.micro_batch,
            threads=worker.threads,
            compiled=compiled,
        )
        self._weights = LoadedPolicy(self._name, "regenerator", config, model, self._score_class)
        record = needs_trajectory(config)
        self._sampler = Sampler(
            config, model, self._reward, steps=stage.steps, micro_batch=stage.micro_batch, record=record
        )
        self._evaluate = evaluating(config, model, self._reward)
        return Attestation(
            worker=self._name,
            device=attestation.device_name(self._device),
            tier=tier,
            score_class=self._score_class,
            checks=checks,
            skipped_layers=len(report.skipped),
            warm_ups=len(self._shapes()) if compiled else 0,
        )

    def _shapes(self) -> tuple[Callable[[PromptEmbedding], None], ...]:
        """One forward of each shape that this worker has."""
        return self._weights.warm_up, self._sampler.warm_up, self._evaluate.warm_up

    def warm_up(self, shape: int, embedding: PromptEmbedding) -> None:
        """As `Explorer.warm_up`."""
        self._shapes()[shape](embedding)

    def _load_reward(self) -> Reward:
        return rewards.load(self._config.rewards, self._device)

    def release_gpu_cache(self) -> int:
        """Leave the GPU's memory to others until the next unit; returns the bytes given back."""
        return free_cache()

    def load_revision(self, payload: Buffer, probe: PromptEmbedding, full: bool) -> Receipt | Refusal:
        """Merge a revision into the weights, in place, and prove it."""
        receipt = self._weights.load(payload, probe, full)
        if self._outside is not None and isinstance(receipt, Receipt) and receipt.policy == "old":
            self._outside = None
            free_cache()
        return receipt

    def regenerate(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> tuple[GroupReport, SampleGroup]:
        """Replay a selection's seeds with the current revision, which must be the unit's."""
        began, started = time.time(), time.perf_counter()
        self._weights.check(unit)
        sampled = self._sampler(unit, prompt, embedding)
        group = SampleGroup(
            iteration=unit.iteration,
            revision=unit.revision,
            prompt_id=unit.prompt_id,
            indices=unit.indices,
            rewards=tuple(sampled.rewards.tolist()),
            latents=sampled.latents.cpu(),
            trajectory=sampled.trajectory,
            seconds=time.perf_counter() - started,
            worker=self._name,
        )
        report = GroupReport(prompt_id=group.prompt_id, rewards=group.rewards, seconds=group.seconds, started=began)
        return report, group

    def audit(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        """Score seeds that were not selected as if they had been; their samples do not leave this method."""
        self._weights.check(unit)
        return scored(self._sampler, unit, prompt, embedding, worker=self._name, score_class=self._score_class)[0]

    def evaluate(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding, pictures: bool) -> Evaluated:
        """Score the loaded policy at a prompt's fixed evaluation addresses."""
        return self._evaluated(self._evaluate, unit, prompt, embedding, pictures)

    def _evaluated(
        self, sampler: Sampler, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding, pictures: bool
    ) -> Evaluated:
        began, started = time.time(), time.perf_counter()
        self._weights.check(unit)
        sampled = sampler(unit, prompt, embedding)
        return Evaluated(
            unit=unit,
            rewards=tuple(sampled.rewards.tolist()),
            images=sampled.images.cpu() if pictures else None,
            seconds=time.perf_counter() - started,
            started=began,
        )

    def score_reference(self, unit: WorkUnit, prompt: Prompt, pictures: bool) -> Evaluated:
        """Score real pictures of a prompt, drawn by the callable of `evaluation.reference`."""
        began, started = time.time(), time.perf_counter()
        images = reference_pictures(self._config, unit, prompt)
        scores = self._reward.score(images.to(self._device), [prompt.text] * len(images))
        return Evaluated(
            unit=unit,
            rewards=tuple(scores.float().cpu().tolist()),
            images=images if pictures else None,
            seconds=time.perf_counter() - started,
            started=began,
        )

    def score(
        self, config: Config, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding, pictures: bool
    ) -> Evaluated:
        """As `evaluate`, by the rewards and settings of an evaluation that was asked for from outside.

        They are kept until the next revision of the sampling policy is loaded.
        """
        try:
            if self._outside is None or self._outside.config != config:
                self._outside = None
                columns = Columns(rewards.load(config.rewards, self._device))
                self._outside = _Outside(config, columns, evaluating(config, self._model, columns))
            evaluated = self._evaluated(self._outside.sampler, unit, prompt, embedding, pictures)
        except BaseException:  # as where there was no memory for them: the run's own work needs what there is
            self._outside = None
            free_cache()
            raise
        return replace(evaluated, columns=self._outside.columns.last)


@dataclass(frozen=True, slots=True)
class _Outside:
    """What a regenerator keeps for an evaluation from outside, beside the model."""

    config: Config
    columns: Columns
    sampler: Sampler


class Scorer(Regenerator):
    """A regenerator of ``solrl eval`` alone: it scores with several rewards at once."""

    def _load_reward(self) -> Reward:
        self._columns = Columns(rewards.load(self._config.rewards, self._device))
        return self._columns

    def evaluate(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding, pictures: bool) -> Evaluated:
        """As a regenerator's, with every reward's column. A unit is one micro-batch, so nothing is padded."""
        evaluated = super().evaluate(unit, prompt, embedding, pictures)
        return replace(evaluated, columns=self._columns.last)


def evaluating(config: Config, model: DiffusionModel, reward: Reward) -> Sampler:
    """Samples as every evaluation does: by the ODE, a prompt's addresses in one micro-batch."""
    evaluation = config.evaluation
    return Sampler(config, model, reward, steps=evaluation.steps, micro_batch=evaluation.samples, sampler=Ode())

"""An explorer samples the candidates of a pool and scores them.

Of a preview only the rewards leave it, and they only rank. In a strategy of one stage its samples are kept, where they
were made, until their prompt's selection: the chosen ones are learned from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from actors.cluster.rpc import Callee
from actors.workers.devices import free_cache, prepare
from actors.workers.loaded_policy import LoadedPolicy, base_to_keep, make_room
from solrl_ray import models, rewards
from solrl_ray.config.checks import needs_trajectory
from solrl_ray.config.pools import pools
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import is_one_stage, pool_sampling
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.compilation import compile_, compile_decoder, what_compiles
from solrl_ray.quantization import attestation
from solrl_ray.quantization.scope import QuantizationReport, quantize_
from solrl_ray.records import (
    Attestation,
    Prompt,
    PromptEmbedding,
    Receipt,
    Refusal,
    SampleGroup,
    UnitResult,
    WorkUnit,
)
from solrl_ray.rollout.sampler import Sampled, Sampler, scored
from solrl_ray.scheduling.iteration_state import group_digest
from solrl_ray.scheduling.worker_state import pool_of
from solrl_ray.weight_sync import base_pack
from solrl_ray.weight_sync.container import Buffer


class Explorer(Callee):
    def __init__(self, name: str, config: Config, pack: Buffer | None = None) -> None:
        """`pack`: the base pack, if this explorer is not to load the checkpoint's transformer."""
        self._name = name
        self._config = config
        self._pack = pack

    def __repr__(self) -> str:
        """What Ray shows in its dashboard and before each line that this process logs."""
        does = "samples" if is_one_stage(self._config) else "previews"
        return f"{self._name} {does} in {pool_sampling(self._config).tier}"

    def start(self) -> Attestation:
        """Build the model, prove the kernel, and say what really runs (design law 5).

        Not in the constructor: there Ray would report an error as the actor's death, without its cause.
        """
        config = self._config
        worker, pool = pools(config.fleet)[pool_of(self._name)], pool_sampling(config)
        device = prepare(worker, deterministic=config.run.deterministic)
        tier = pool.tier
        model, report, kept = self._build(device)
        checks = attestation.attest(model.transformer, tier, report)
        make_room(model.transformer, config, model.dtype)
        checks["compiled"] = compile_(model.transformer, config.compile, device, tier)
        checks["decoder compiled"] = compile_decoder(model.decoder, config.compile, device)
        compiled = what_compiles(checks["compiled"], checks["decoder compiled"])
        self._score_class = attestation.score_class(
            device,
            tier,
            micro_batch=pool.micro_batch,
            threads=worker.threads,
            compiled=compiled,
        )
        self._weights = LoadedPolicy(self._name, "explorer", config, model, self._score_class, quantized_base=kept)
        self._sampler = Sampler(
            config,
            model,
            rewards.load(config.rewards, device),
            steps=pool.steps,
            micro_batch=pool.micro_batch,
            record=is_one_stage(config) and needs_trajectory(config),
        )
        return Attestation(
            worker=self._name,
            device=attestation.device_name(device),
            tier=tier,
            score_class=self._score_class,
            checks=checks,
            quantized_layers=len(report.layers),
            skipped_layers=len(report.skipped),
            warm_ups=len(self._shapes()) if compiled else 0,
        )

    def _shapes(self) -> tuple[Callable[[PromptEmbedding], None], ...]:
        """One forward of each shape that this worker has."""
        return self._weights.warm_up, self._sampler.warm_up

    def warm_up(self, shape: int, embedding: PromptEmbedding) -> None:
        """Have code compiled for one shape of the forward: a call of its own, so that all can see how far it is."""
        self._shapes()[shape](embedding)

    def _build(self, device: torch.device) -> tuple[DiffusionModel, QuantizationReport, dict[str, torch.Tensor]]:
        """The quantised model, what was quantised, and what `Receiver` must remember of the base."""
        config = self._config
        decoder = "vae" if is_one_stage(config) else "preview_decoder"  # what is learned from is decoded in full
        if self._pack is None:
            model = models.load(config.model, device, components={"transformer", decoder})
            kept = base_to_keep(model.transformer, config)
            report = quantize_(model.transformer, pool_sampling(config).tier, config.model.quantization)
            return model, report, kept
        transformer = models.family(config.model).skeleton(config.model)
        report = base_pack.build(transformer, base_pack.read(self._pack, config), config, device)
        self._pack = None  # its memory may be given back
        model = models.load(config.model, device, components={decoder})
        model.take(transformer)
        return model, report, {}

    def release_gpu_cache(self) -> int:
        """Leave the GPU's memory to others until the next unit; returns the bytes given back."""
        return free_cache()

    def load_revision(self, payload: Buffer, probe: PromptEmbedding, full: bool) -> Receipt | Refusal:
        """Swap a revision in, in place, and prove it."""
        return self._weights.load(payload, probe, full)

    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        """Score a micro-batch of candidates with exactly the unit's revision."""
        return self._sampled(unit, prompt, embedding)[0]

    def sample(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> tuple[UnitResult, SampleGroup]:
        """As `explore`, with the samples as a second part, which stays on this node until somebody asks for it."""
        result, sampled = self._sampled(unit, prompt, embedding)
        group = SampleGroup(
            iteration=unit.iteration,
            revision=unit.revision,
            prompt_id=unit.prompt_id,
            indices=unit.indices,
            rewards=result.rewards,
            latents=sampled.latents.cpu(),
            trajectory=sampled.trajectory,
            seconds=result.seconds,
            worker=self._name,
        )
        return replace(result, samples_digest=group_digest(group)), group

    def _sampled(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> tuple[UnitResult, Sampled]:
        self._weights.check(unit)
        return scored(self._sampler, unit, prompt, embedding, worker=self._name, score_class=self._score_class)

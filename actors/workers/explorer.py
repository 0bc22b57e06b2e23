"""An explorer samples the candidates of a prompt's pool and scores them.

With two stages it makes previews: only their rewards leave the explorer, and these serve only for ranking. With one
stage, the samples stay on its node until the selection of their prompt, and the learner trains on the chosen ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from actors.cluster.progress_notes import noted
from actors.workers.devices import prepare
from actors.workers.sampling_worker import SamplingWorker
from solrl_ray import models, rewards
from solrl_ray.common.progress_note import progress_note
from solrl_ray.config.pools import pools
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import is_one_stage, pool_sampling, unreproducible_rewards
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.components import Component
from solrl_ray.quantization.scope import QuantizationReport, quantize_
from solrl_ray.records import Attestation, Prompt, PromptEmbedding, SampleGroup, UnitResult, WorkUnit
from solrl_ray.rollout.sampler import group_of
from solrl_ray.scheduling.iteration_state import group_digest
from solrl_ray.scheduling.worker_state import pool_of
from solrl_ray.weight_sync.receive import Receiver, bases_to_keep


class Explorer(SamplingWorker):
    role = "explorer"

    def __init__(self, name: str, config: Config) -> None:
        super().__init__(name, config)
        self._repeats = not unreproducible_rewards(config)
        """True if its scores are reproducible."""

    def _title(self) -> str:
        does = "samples" if is_one_stage(self._config) else "previews"
        return f"{self._name} {does} in {pool_sampling(self._config).tier}"

    @noted
    def start(self) -> Attestation:
        """Build the quantised model and attest its arithmetic."""
        config = self._config
        worker = pools(config.fleet)[pool_of(self._name)]
        device = prepare(worker, deterministic=config.run.deterministic)
        model, report, receiver = self._build(device)
        reward = rewards.load(config.rewards, device) if self._shared is None else self._shared.reward(device)
        return self._attest(
            model,
            report,
            reward,
            pool_sampling(config),
            threads=worker.threads,
            record=is_one_stage(config) and config.objective.needs_trajectory,
            receiver=receiver,
        )

    def _build(self, device: torch.device) -> tuple[DiffusionModel, QuantizationReport, Receiver]:
        """The quantised model, the report on its quantised layers, and its receiver of weights."""
        config = self._config
        # Samples for training need the full decoder.
        decoder: Component = "vae" if is_one_stage(config) else "preview_decoder"
        if self._shared is not None:
            model = self._shared.load(device, {"transformer", decoder})
            return model, *self._shared.quantized(model.transformer, config)
        transformer = models.load(config.model, "cpu", components={"transformer"}).transformer
        tier = pool_sampling(config).tier
        with progress_note(f"quantising the transformer to {tier}"):
            kept = bases_to_keep(transformer, config, device)
            report = quantize_(transformer, tier, config.model.quantization, device=device)
        model = models.load(config.model, device, components={decoder})
        model.use_transformer(transformer)
        return model, report, Receiver(transformer, quantized_base=kept)

    def prepare(self) -> None:
        """Prepare for the next revision: on a shared GPU, do the work that does not depend on its weights."""
        if self._shared is not None:
            self._shared.prepare()

    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        """Score a unit's candidates with exactly the unit's revision; twice if previews are stopped early."""
        return self._scored(self._sampler.preview, unit, prompt, embedding)[0]

    def sample(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> tuple[UnitResult, SampleGroup]:
        """Sample and score a unit's seeds. The second part of the answer, the samples, stays on this node until it is
        fetched.
        """
        result, sampled = self._scored(self._sampler, unit, prompt, embedding)
        group = group_of(result, sampled)
        return replace(result, samples_digest=group_digest(group, scores=self._repeats)), group

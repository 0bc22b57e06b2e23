"""An explorer ranks candidates in low precision. Its images never leave it; its rewards only rank."""

from __future__ import annotations

import time

from actors.devices import prepare
from actors.weights import WeightHolder
from solrl_ray import models, rewards
from solrl_ray.config.schema import Config
from solrl_ray.quantization import attestation
from solrl_ray.quantization.scope import quantize_
from solrl_ray.records import Attestation, Prompt, PromptEmbedding, Receipt, UnitResult, WorkUnit
from solrl_ray.rollout import Sampler


class Explorer:
    def __init__(self, name: str, config: Config) -> None:
        self._name = name
        self._config = config
        worker, preview = config.fleet.explorers, config.rollout.preview
        device = prepare(worker)
        self._model = models.load(config.model, device, components={"transformer", "vae"})
        self._tier = preview.precision
        self._report = quantize_(self._model.transformer, self._tier, config.model.quantization)
        self._score_class = attestation.score_class(
            device, self._tier, micro_batch=preview.micro_batch, threads=worker.threads
        )
        self._weights = WeightHolder(name, "explorer", config, self._model, self._score_class)
        self._sampler = Sampler(
            config,
            self._model,
            rewards.load(config.rewards, device),
            steps=preview.steps,
            micro_batch=preview.micro_batch,
        )

    def start(self) -> Attestation:
        """Prove the kernel, and say what really runs (design law 5)."""
        checks = attestation.attest(self._model.transformer, self._tier, self._report)
        return Attestation(
            worker=self._name,
            device=attestation.device_name(self._model.device),
            tier=self._tier,
            score_class=self._score_class,
            checks=checks,
            quantized_layers=len(self._report.layers),
            skipped_layers=len(self._report.skipped),
        )

    def load_revision(self, payload: bytes, probe: PromptEmbedding) -> Receipt:
        """Swap a revision in, in place, and prove it."""
        return self._weights.load(payload, probe)

    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        """Score a micro-batch of candidates with exactly the unit's revision."""
        started = time.perf_counter()
        self._weights.check(unit)
        sampled = self._sampler(unit, prompt, embedding)
        return UnitResult(
            unit=unit,
            rewards=tuple(sampled.rewards.tolist()),
            worker=self._name,
            score_class=self._score_class,
            seconds=time.perf_counter() - started,
        )

"""An explorer ranks candidates in low precision. Its images never leave it; its rewards only rank."""

from __future__ import annotations

import time

from actors.devices import prepare
from actors.weights import WeightHolder, base_to_keep, make_room
from solrl_ray import models, rewards
from solrl_ray.compilation import compile_, compiles
from solrl_ray.config.schema import Config
from solrl_ray.quantization import attestation
from solrl_ray.quantization.scope import quantize_
from solrl_ray.records import Attestation, Prompt, PromptEmbedding, Receipt, Refusal, UnitResult, WorkUnit
from solrl_ray.revisions.container import Buffer
from solrl_ray.rollout import Sampler


class Explorer:
    def __init__(self, name: str, config: Config) -> None:
        self._name = name
        self._config = config

    def __repr__(self) -> str:
        """What Ray shows in its dashboard and before each line that this process logs."""
        return f"{self._name} previews in {self._config.rollout.preview.precision}"

    def start(self) -> Attestation:
        """Build the model, prove the kernel, and say what really runs (design law 5).

        Not in the constructor: there Ray would report an error as the actor's death, without its cause.
        """
        config = self._config
        worker, preview = config.fleet.explorers, config.rollout.preview
        device = prepare(worker)
        model = models.load(config.model, device, components={"transformer", "preview_decoder"})
        tier = preview.precision
        kept = base_to_keep(model.transformer, config)
        report = quantize_(model.transformer, tier, config.model.quantization)
        checks = attestation.attest(model.transformer, tier, report)
        make_room(model.transformer, config, model.dtype)
        checks["compiled"] = compile_(model.transformer, config.compile, device, tier)
        self._score_class = attestation.score_class(
            device,
            tier,
            micro_batch=preview.micro_batch,
            threads=worker.threads,
            compiled=checks["compiled"] if compiles(config.compile, device, tier) else "",
        )
        self._weights = WeightHolder(self._name, "explorer", config, model, self._score_class, quantized_base=kept)
        self._sampler = Sampler(
            config,
            model,
            rewards.load(config.rewards, device),
            steps=preview.steps,
            micro_batch=preview.micro_batch,
        )
        return Attestation(
            worker=self._name,
            device=attestation.device_name(device),
            tier=tier,
            score_class=self._score_class,
            checks=checks,
            quantized_layers=len(report.layers),
            skipped_layers=len(report.skipped),
        )

    def load_revision(self, payload: Buffer, probe: PromptEmbedding, full: bool) -> Receipt | Refusal:
        """Swap a revision in, in place, and prove it."""
        return self._weights.load(payload, probe, full)

    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        """Score a micro-batch of candidates with exactly the unit's revision."""
        began, started = time.time(), time.perf_counter()
        self._weights.check(unit)
        sampled = self._sampler(unit, prompt, embedding)
        return UnitResult(
            unit=unit,
            rewards=tuple(sampled.rewards.tolist()),
            worker=self._name,
            score_class=self._score_class,
            seconds=time.perf_counter() - started,
            started=began,
        )

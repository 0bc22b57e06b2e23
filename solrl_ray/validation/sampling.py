"""The steps of explorers and regenerators: previews in each of the device's tiers, chosen seeds sampled twice."""

from __future__ import annotations

import time

import torch

from solrl_ray.config.checks import needs_trajectory
from solrl_ray.config.samplers import Ode
from solrl_ray.config.strategies import UNQUANTIZED_TIERS, full_tier
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.compilation import compile_, compile_decoder
from solrl_ray.quantization import attestation, capability
from solrl_ray.quantization.scope import quantize_
from solrl_ray.rollout.sampler import Sampler
from solrl_ray.validation.outcomes import Lacks, Measure, at_most, info, is_true
from solrl_ray.validation.session import SEEDS, Brightness, Session, psnr, relative_error
from solrl_ray.weight_sync.checksums import tensors_digest

FORWARD_LIMITS = {
    "fp8": (0.2, "E4M3 has 3 bits of mantissa: one rounding is up to 2^-4 = 0.06, and each product has two"),
    "nvfp4": (0.6, "E2M1 has 1 bit of mantissa: one rounding is up to 2^-2 = 0.25, and each product has two"),
    "nvfp4-emulated": (0.6, "E2M1 has 1 bit of mantissa: one rounding is up to 2^-2 = 0.25, and each product has two"),
}
"""Tier → largest relative error of one velocity against full precision, and why. Mixed-up scales or layers give about
1.
"""
TIMED = 3
"""Forwards, of which the fastest is reported."""


def regenerate(session: Session) -> list[Measure]:
    """Sample the seeds of each prompt twice as configured, and then a preview of the first prompt in this precision."""
    config, model = session.config, session.loaded
    said = _prepare(session, model, full_tier(config.model))
    stage = config.rollout.regenerate
    record = needs_trajectory(config)
    sampler = Sampler(config, model, Brightness("brightness"), steps=stage.steps, micro_batch=len(SEEDS), record=record)
    digests, seconds = [], []
    for _ in range(2):
        started = time.perf_counter()
        made = [session.sample(sampler, prompt) for prompt in session.prompts]
        seconds.append(time.perf_counter() - started)
        # The device's own bytes, not those of copies: see `Sampled`.
        digests.append([tensors_digest({"latents": s.latents, "images": s.images}) for s, _ in made])
        session.groups = [group for _, group in made]
    session.pictures[f"samples, {stage.steps} steps"] = list(made[0][0].images.cpu())
    finite = all(bool(torch.isfinite(group.latents).all()) for group in session.groups)
    measures = [
        *said,
        is_true("finite", finite, "NaN in a sample would end a run"),
        is_true("equal bytes the second time", digests[0] == digests[1], "a score is a function of its unit alone"),
        info("seconds the second time, each sample", seconds[1] / len(session.prompts) / len(SEEDS)),
    ]
    session.reference = session.probe(model)
    previewed = _preview(session, model, full_tier(config.model))
    return [*measures, *previewed]


def preview(session: Session, tier: str) -> list[Measure]:
    """Load the model, quantise it, attest it, and draw previews; raises `Lacks` if the device lacks the tier."""
    reason = capability.lacks(tier, session.device)
    if reason:
        raise Lacks(reason)
    session.release()
    scope = session.config.model.quantization
    model = session.load("transformer", "vae")
    report = quantize_(model.transformer, tier, scope)
    checks = attestation.attest(model.transformer, tier, report)
    attested = [info(f"attested: {name}", found) for name, found in checks.items()]
    said = _prepare(session, model, tier)
    assert session.reference is not None
    error = relative_error(session.probe(model), session.reference)
    limit, why = FORWARD_LIMITS[tier]
    return [
        at_most("relative error of a velocity to full precision", error, limit, why),
        *said,
        *_preview(session, model, tier),
        *attested,
    ]


def _prepare(session: Session, model: DiffusionModel, tier: str) -> list[Measure]:
    """Compile forwards as workers do."""
    settings, device = session.config.compile, model.device
    said = {
        "compiled": compile_(model.transformer, settings, device, tier),
        "decoder compiled": compile_decoder(model.decoder, settings, device),
    }
    started = time.perf_counter()
    session.probe(model)
    first = time.perf_counter() - started
    return [*(info(name, words) for name, words in said.items()), info("seconds of the first forward", first)]


def _preview(session: Session, model: DiffusionModel, tier: str) -> list[Measure]:
    config, prompt = session.config, session.prompts[0]
    sampler = Sampler(
        config,
        model,
        Brightness("brightness"),
        steps=session.steps,
        micro_batch=len(SEEDS),
        sampler=Ode(),  # works with any number of steps
    )
    images = list(session.sample(sampler, prompt)[0].images.cpu())
    full, row = _row(full_tier(config.model), session.steps), _row(tier, session.steps)
    session.pictures[row] = images
    measures = [info("seconds of a forward on two samples", _fastest(session, model))]
    if tier not in UNQUANTIZED_TIERS and full in session.pictures:
        pairs = zip(images, session.pictures[full], strict=True)
        measures.append(info("lowest PSNR to previews in full precision, dB", min(psnr(a, b) for a, b in pairs)))
    return measures


def _row(tier: str, steps: int) -> str:
    return f"preview {tier}, {steps} steps"


@torch.no_grad()
def _fastest(session: Session, model: DiffusionModel) -> float:
    """Seconds of one compiled forward with a micro-batch of previews."""
    embedding = model.batch_embeddings([session.embeddings[session.prompts[0].id]] * len(SEEDS))
    latents = session.noise(model, len(SEEDS)).to(model.device)
    spent = []
    for _ in range(TIMED):
        _wait(model.device)
        started = time.perf_counter()
        model.velocity(latents, 0.5, embedding)
        _wait(model.device)
        spent.append(time.perf_counter() - started)
    return min(spent)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

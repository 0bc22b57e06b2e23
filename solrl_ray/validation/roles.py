"""The steps of a run's workers: chosen seeds sampled twice, previews in each tier, one update, its revision."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from solrl_ray.config.samplers import Ode
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import UNQUANTIZED_TIERS, full_tier
from solrl_ray.learning.engine import free_port, leave_process_group, process_group
from solrl_ray.learning.learner import Learner
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.compilation import compile_, compile_decoder, compiles
from solrl_ray.quantization import attestation, capability
from solrl_ray.quantization.scope import quantize_
from solrl_ray.rollout.sampler import Sampler
from solrl_ray.validation.session import PROMPTS, SEEDS, Brightness, Session, psnr, relative_error
from solrl_ray.validation.steps import Lacks, Measure, above_zero, at_most, is_true
from solrl_ray.weight_sync.checksums import tensors_digest
from solrl_ray.weight_sync.publication import EXPLORER, Publication
from solrl_ray.weight_sync.publish import Publisher
from solrl_ray.weight_sync.receive import Receiver

_FP4 = (0.6, "E2M1 has 1 bit of mantissa: one rounding is up to 2^-2 = 0.25, and each product has two")
FORWARD_LIMITS = {
    "fp8": (0.2, "E4M3 has 3 bits of mantissa: one rounding is up to 2^-4 = 0.06, and each product has two"),
    "nvfp4": _FP4,
    "nvfp4-emulated": _FP4,
}
"""Tier → largest relative error of a velocity against full precision, and why. Mixed-up scales give about 1."""
TIMED = 3
"""Forwards, of which the fastest is reported."""
ENLARGED = 100
"""Times the B factors of one update: some percent of a weight, as after many."""


def regenerate(session: Session) -> list[Measure]:
    """Sample the seeds of each prompt twice as configured, and then a preview of the first prompt in this precision."""
    config, model, tier = session.config, session.model, full_tier(session.config.model)
    assert model
    session.reference, said = _compiled(session, model, tier)
    steps, record = config.rollout.regenerate.steps, config.objective.needs_trajectory
    sampler = Sampler(config, model, Brightness("brightness"), steps=steps, micro_batch=len(SEEDS), record=record)
    (made, again), digests = [[session.sample(sampler, prompt) for prompt in PROMPTS] for _ in range(2)], []
    for twice in (made, again):
        # The device's own bytes, not those of copies: see `Sampled`.
        digests.append([tensors_digest({"latents": each.latents, "images": each.images}) for each, _ in twice])
    session.groups = [group for _, group in again]
    session.pictures[f"samples, {steps} steps"] = list(made[0][0].images.cpu())
    finite = all(bool(torch.isfinite(group.latents).all()) for group in session.groups)
    return [
        *said,
        is_true("finite", finite, "NaN in a sample would end a run"),
        is_true("equal bytes the second time", digests[0] == digests[1], "a score is a function of its unit alone"),
        *_preview(session, model, tier),
    ]


def preview(session: Session, tier: str) -> list[Measure]:
    """Load the model, quantise it, attest it, and draw previews; raises `Lacks` if the device lacks the tier."""
    if reason := capability.lacks(tier, session.device):
        raise Lacks(reason)
    session.release()
    model = session.load("transformer", "vae")
    report = quantize_(model.transformer, tier, session.config.model.quantization)
    attested = attestation.attest(model.transformer, tier, report)
    velocity, said = _compiled(session, model, tier)
    assert session.reference is not None
    limit, why = FORWARD_LIMITS[tier]
    error = relative_error(velocity, session.reference)
    return [
        at_most("relative error of a velocity to full precision", error, limit, why),
        *said,
        *_preview(session, model, tier),
        *(Measure(f"attested: {name}", found) for name, found in attested.items()),
    ]


def _compiled(session: Session, model: DiffusionModel, tier: str) -> tuple[Tensor, list[Measure]]:
    """Compile forwards as workers do; the velocity of a probe, and its times."""
    settings, device = session.config.compile, model.device
    said = compile_(model.transformer, settings, device, tier), compile_decoder(model.decoder, settings, device)
    (velocity, first), *again = [session.probe(model) for _ in range(1 + TIMED)]
    return velocity, [
        Measure("compiled", said[0]),
        Measure("decoder compiled", said[1]),
        Measure("seconds of the first forward", first),
        Measure("seconds of a forward on two samples", min(seconds for _, seconds in again)),
    ]


def _preview(session: Session, model: DiffusionModel, tier: str) -> list[Measure]:
    ode, steps = Ode(), session.steps  # which works with any number of steps
    sampler = Sampler(session.config, model, Brightness("brightness"), steps=steps, micro_batch=len(SEEDS), sampler=ode)
    images = list(session.sample(sampler, PROMPTS[0])[0].images.cpu())
    session.pictures[f"preview {tier}, {steps} steps"] = images
    if tier in UNQUANTIZED_TIERS:
        return []
    full = session.pictures[f"preview {full_tier(session.config.model)}, {steps} steps"]
    lowest = min(psnr(a, b) for a, b in zip(images, full, strict=True))
    return [Measure("lowest PSNR to previews in full precision, dB", lowest)]


@contextmanager
def alone(session: Session, config: Config, *components: str) -> Iterator[tuple[DiffusionModel, Learner]]:
    """A loaded model and its learner, in a group of one."""
    # One optimiser step, because the configured ones may need more than two prompts.
    config = config.changed({"learner.world_size": 1, "learner.updates": 1})
    where, seconds, network = session.device, config.fleet.deadlines.collective, config.fleet.network
    process_group(0, 1, "127.0.0.1", free_port(), device=where, timeout=seconds, one_host=True, network=network)
    try:
        model = session.load(*components)
        learner = Learner(config, model, 0, 1)
        try:
            yield model, learner
        finally:
            learner.close()
    finally:
        leave_process_group()


def update(session: Session) -> list[Measure]:
    """One update of the configured objective on the samples of `regenerate`, by a learner group of one."""
    session.release()
    with alone(session, session.config, "transformer") as (_, learner):
        before = learner.factors("default")
        metrics = learner.update(0, session.groups, session.embeddings)
        after = learner.factors("default")
    session.factors = {name: factor * ENLARGED ** name.endswith(".lora_B") for name, factor in after.items()}
    changed = sum(not torch.equal(after[name], factor) for name, factor in before.items())
    finite = all(bool(torch.isfinite(factor).all()) for factor in after.values())
    return [
        Measure("objective", session.config.objective.kind),
        Measure("compiled", learner.compiled or "no"),
        Measure("loss", metrics.loss),
        is_true("loss and factors are finite", finite and math.isfinite(metrics.loss), "else a run ends here"),
        above_zero("gradient norm", metrics.gradient_norm, "else nothing is learned"),
        above_zero(f"factors that changed, of {len(before)}", changed, "else the optimiser reaches no LoRA"),
    ]


def revision(session: Session) -> list[Measure]:
    """Publish the factors of `update`, enlarged, and let an explorer take them."""
    session.release()
    tier, settings = capability.available(session.device)[0], session.config.compile
    config, model = session.config, session.load("transformer")
    built = Publisher.for_model(model.transformer, config, tier=tier).build(1, session.factors)
    payload = Publication(revision=built, mode="packed").payload(EXPLORER)
    payload.verify()
    quantize_(model.transformer, tier, config.model.quantization)
    compile_(model.transformer, settings, model.device, tier)
    receiver = Receiver(model.transformer)
    compiled = compiles(settings, model.device, tier)
    (before, _), graphs, places = session.probe(model), _compiled_graphs() if compiled else 0, _places(model)
    expected = payload.manifest.expected[EXPLORER]
    equal = receiver.apply(payload) == (expected.modules, expected.digest)
    moved = relative_error(session.probe(model)[0], before)
    measures = [
        Measure("explorer's tier", tier),
        Measure("payload, MB", payload.nbytes / 1e6),
        is_true("modules and digest are as published", equal, "else a run stops at the receipt"),
        above_zero("relative change of the velocity", moved, "else the swap reached no weight in use"),
        is_true("weights keep their addresses", places == _places(model), "compiled code and graphs read them"),
    ]
    if compiled:
        why = "compiling takes longer than an iteration"
        measures.append(is_true("nothing was compiled again", _compiled_graphs() == graphs > 0, why))
    return measures


def _places(model: DiffusionModel) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.transformer.state_dict().items()}


def _compiled_graphs() -> int:
    from torch._dynamo.utils import counters  # late: it imports the compiler

    return int(counters["stats"]["unique_graphs"])

"""The steps of a run's workers: chosen seeds sampled twice, previews in each tier, revisions swapped in, one update."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor, nn

from solrl_ray.config.samplers import Ode
from solrl_ray.config.schema import Lora
from solrl_ray.config.strategies import UNQUANTIZED_TIERS, full_tier
from solrl_ray.learning.engine import free_port, leave_process_group, process_group
from solrl_ray.learning.learner import Learner
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.compilation import compile_, compile_decoder, compiles
from solrl_ray.quantization import attestation, capability
from solrl_ray.quantization.scope import quantize_
from solrl_ray.records import Address
from solrl_ray.rollout.sampler import Sampler
from solrl_ray.sampling.noise import initial_noise
from solrl_ray.validation.session import PROMPTS, SEEDS, Brightness, Session, psnr, relative_error
from solrl_ray.validation.steps import Lacks, Measure, above_zero, at_most, info, is_true
from solrl_ray.weight_sync import payload
from solrl_ray.weight_sync.checksums import tensors_digest
from solrl_ray.weight_sync.publication import EXPLORER, REGENERATOR, Publications
from solrl_ray.weight_sync.publish import Publisher, touched_linears
from solrl_ray.weight_sync.receive import Receiver

_FP4 = (0.6, "E2M1 has 1 bit of mantissa: one rounding is up to 2^-2 = 0.25, and each product has two")
FORWARD_LIMITS = {
    "fp8": (0.2, "E4M3 has 3 bits of mantissa: one rounding is up to 2^-4 = 0.06, and each product has two"),
    "nvfp4": _FP4,
    "nvfp4-emulated": _FP4,
}
"""Tier → largest relative error of one velocity against full precision, and why. Mixed-up scales or layers give about
1.
"""
TIMED = 3
"""Forwards, of which the fastest is reported."""
B_SCALE = 0.02
"""Standard deviation of the made-up B factors: some percent of a weight, as after many updates."""


def regenerate(session: Session) -> list[Measure]:
    """Sample the seeds of each prompt twice as configured, and then a preview of the first prompt in this precision."""
    config, model, tier = session.config, session.model, full_tier(session.config.model)
    assert model
    session.reference, said = _compiled(session, model, tier)
    steps, record = config.rollout.regenerate.steps, config.objective.needs_trajectory
    sampler = Sampler(config, model, Brightness("brightness"), steps=steps, micro_batch=len(SEEDS), record=record)
    digests = []
    for _ in range(2):
        started = time.perf_counter()
        made = [session.sample(sampler, prompt) for prompt in PROMPTS]
        seconds = time.perf_counter() - started
        # The device's own bytes, not those of copies: see `Sampled`.
        digests.append([tensors_digest({"latents": s.latents, "images": s.images}) for s, _ in made])
    session.groups = [group for _, group in made]
    session.pictures[f"samples, {steps} steps"] = list(made[0][0].images.cpu())
    finite = all(bool(torch.isfinite(group.latents).all()) for group in session.groups)
    return [
        *said,
        is_true("finite", finite, "NaN in a sample would end a run"),
        is_true("equal bytes the second time", digests[0] == digests[1], "a score is a function of its unit alone"),
        info("seconds the second time, each sample", seconds / len(PROMPTS) / len(SEEDS)),
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
        *(info(f"attested: {name}", found) for name, found in attested.items()),
    ]


def _compiled(session: Session, model: DiffusionModel, tier: str) -> tuple[Tensor, list[Measure]]:
    """Compile forwards as workers do; the velocity of a probe, and its times."""
    settings, device = session.config.compile, model.device
    said = compile_(model.transformer, settings, device, tier), compile_decoder(model.decoder, settings, device)
    (velocity, first), *again = [session.probe(model) for _ in range(1 + TIMED)]
    return velocity, [
        info("compiled", said[0]),
        info("decoder compiled", said[1]),
        info("seconds of the first forward", first),
        info("seconds of a forward on two samples", min(seconds for _, seconds in again)),
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
    return [info("lowest PSNR to previews in full precision, dB", lowest)]


def revision(session: Session) -> list[Measure]:
    """Publish two revisions, and let an explorer and a regenerator replace the first by the second."""
    session.release()
    tier = capability.available(session.device)[0]
    publish = session.config.publish.model_copy(update={"mode": "packed"})
    config = session.config.model_copy(update={"publish": publish})
    model = session.load("transformer")
    factors = made_factors(model.transformer, config.model.lora, config.run.seed)
    nothing = {name: torch.zeros_like(f) if name.endswith(".lora_B") else f for name, f in factors.items()}
    publisher, publications = Publisher.for_model(model.transformer, config, tier=tier), Publications(publish)
    sent = [publications.publish(publisher.build(number, each)) for number, each in enumerate((nothing, factors))]
    del publisher
    quantize_(model.transformer, tier, config.model.quantization)
    # For an explorer a snapshot and a delta.
    measures = [info("explorer's tier", tier)]
    measures += _swapped(session, model, [one.payload(EXPLORER) for one in sent], EXPLORER, tier)
    del model
    session.release()
    model, tier = session.load("transformer"), full_tier(config.model)
    return measures + _swapped(session, model, [one.payload(REGENERATOR) for one in sent], REGENERATOR, tier)


def _swapped(session: Session, model: DiffusionModel, sent: list[bytes], role: str, tier: str) -> list[Measure]:
    settings = session.config.compile
    compile_(model.transformer, settings, model.device, tier)
    compiled = compiles(settings, model.device, tier)
    receiver = Receiver(model.transformer)
    velocities, graphs, places = [], [], []
    equal = True
    for content in sent:
        received = payload.read(content)
        bound, digest = receiver.apply(received)
        expected = received.manifest.expected[role]
        equal &= (bound, digest) == (expected.modules, expected.digest)
        velocities.append(session.probe(model)[0])
        graphs.append(_compiled_graphs() if compiled else 0)
        places.append({name: tensor.data_ptr() for name, tensor in model.transformer.state_dict().items()})
    moved = relative_error(velocities[1], velocities[0])
    measures = [
        info(f"{role}: modules bound", bound),
        info(f"{role}: payloads, MB", " then ".join(f"{len(content) / 1e6:.2f}" for content in sent)),
        is_true(f"{role}: digests are those that were published", equal, "else a run stops at the receipt"),
        above_zero(f"{role}: relative change of the velocity", moved, "else the swap reached no weight in use"),
        is_true(f"{role}: weights keep their addresses", places[0] == places[1], "compiled code and graphs read them"),
    ]
    if compiled:
        why = "compiling takes longer than an iteration"
        measures.append(is_true(f"{role}: nothing was compiled again", graphs[1] == graphs[0] > 0, why))
    return measures


def _compiled_graphs() -> int:
    from torch._dynamo.utils import counters  # late: it imports the compiler

    return int(counters["stats"]["unique_graphs"])


def made_factors(transformer: nn.Module, lora: Lora, run_seed: int) -> dict[str, Tensor]:
    """Addressed factors of every linear that LoRA touches, by their names in a revision, float32 on the CPU."""
    factors = {}
    for module, linear in touched_linears(transformer, lora.targets).items():
        shapes = {"lora_A": (lora.rank, linear.in_features), "lora_B": (linear.out_features, lora.rank)}
        for name, shape in shapes.items():
            where = Address(run_seed=run_seed, purpose="validation", prompt_id=f"{module}.{name}")
            scale = B_SCALE if name == "lora_B" else linear.in_features**-0.5
            factors[f"{module}.{name}"] = initial_noise([where], shape)[0] * scale
    return factors


def update(session: Session) -> list[Measure]:
    """One update of the configured objective on the samples of `regenerate`, by a learner group of one."""
    session.release()
    # One optimiser step, because the configured ones may need more than two prompts.
    alone = session.config.learner.model_copy(update={"world_size": 1, "updates": 1})
    config = session.config.model_copy(update={"learner": alone})
    where, seconds, network = session.device, config.fleet.deadlines.collective, config.fleet.network
    process_group(0, 1, "127.0.0.1", free_port(), device=where, timeout=seconds, one_host=True, network=network)
    try:
        learner = Learner(config, session.load("transformer"), 0, 1)
        try:
            before = learner.factors("default")
            metrics = learner.update(0, session.groups, session.embeddings)
            after = learner.factors("default")
        finally:
            learner.close()
    finally:
        leave_process_group()
    changed = sum(not torch.equal(after[name], factor) for name, factor in before.items())
    finite = all(bool(torch.isfinite(factor).all()) for factor in after.values())
    return [
        info("objective", config.objective.kind),
        info("compiled", learner.compiled or "no"),
        info("loss", metrics.loss),
        is_true("loss is finite", math.isfinite(metrics.loss), "else a run ends here"),
        above_zero("gradient norm", metrics.gradient_norm, "else nothing is learned"),
        above_zero(f"factors that changed, of {len(before)}", changed, "else the optimiser reaches no LoRA"),
        is_true("factors are finite", finite, "else a run ends here"),
        info("samples", metrics.samples),
        info("forward and backward passes", metrics.passes),
        info("micro-batch", config.learner.micro_batch),
    ]

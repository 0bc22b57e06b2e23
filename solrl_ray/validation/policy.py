"""The steps of learners and receivers: one update of the policy, one revision published and swapped in."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from solrl_ray.config.schema import Config, Lora, Publish
from solrl_ray.config.strategies import full_tier
from solrl_ray.learning.engine import free_port, leave_process_group, process_group
from solrl_ray.learning.learner import Learner
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.compilation import compile_, compiles
from solrl_ray.quantization import capability
from solrl_ray.quantization.scope import quantize_
from solrl_ray.records import Address
from solrl_ray.sampling.noise import initial_noise
from solrl_ray.validation.outcomes import Measure, above_zero, info, is_true
from solrl_ray.validation.session import Session, relative_error
from solrl_ray.weight_sync import payload
from solrl_ray.weight_sync.publication import EXPLORER, REGENERATOR, Publications
from solrl_ray.weight_sync.publish import Publisher, touched_linears
from solrl_ray.weight_sync.receive import Receiver

B_SCALE = 0.02
"""Standard deviation of the made-up B factors: some percent of a weight, as after many updates."""


def update(session: Session) -> list[Measure]:
    """One update of the configured objective on the samples of `regenerate`, by a learner group of one."""
    session.release()
    config = _of_one(session.config)
    process_group(
        0,
        1,
        "127.0.0.1",
        free_port(),
        device=session.device,
        timeout=config.fleet.deadlines.collective,
        one_host=True,
        network=config.fleet.network,
    )
    try:
        return _updated(session, config)
    finally:
        leave_process_group()


def _updated(session: Session, config: Config) -> list[Measure]:
    learner = Learner(config, session.load("transformer"), 0, 1)
    try:
        before = learner.factors("default")
        metrics = learner.update(0, session.groups, session.embeddings)
        after = learner.factors("default")
    finally:
        learner.close()
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


def _of_one(config: Config) -> Config:
    """With one rank and one optimiser step, because the configured steps may need more than two prompts."""
    return config.model_copy(update={"learner": config.learner.model_copy(update={"world_size": 1, "updates": 1})})


def revision(session: Session) -> list[Measure]:
    """Publish two revisions, and let an explorer and a regenerator replace the first by the second."""
    session.release()
    tier = capability.available(session.device)[0]
    publish = session.config.publish.model_copy(update={"mode": "packed"})
    config = session.config.model_copy(update={"publish": publish})
    model = session.load("transformer")
    factors = made_factors(model.transformer, config.model.lora, config.run.seed)
    nothing = {name: torch.zeros_like(f) if name.endswith(".lora_B") else f for name, f in factors.items()}
    publisher = Publisher.for_model(model.transformer, config, tier=tier)
    sent = _sent(publish, [publisher.build(0, nothing), publisher.build(1, factors)])
    del publisher
    quantize_(model.transformer, tier, config.model.quantization)
    measures = [info("explorer's tier", tier), *_swapped(session, model, sent[EXPLORER], EXPLORER, tier)]
    del model
    session.release()
    model, tier = session.load("transformer"), full_tier(config.model)
    return [*measures, *_swapped(session, model, sent[REGENERATOR], REGENERATOR, tier)]


def _sent(publish: Publish, revisions: list[payload.Revision]) -> dict[str, list[bytes]]:
    """Role → payloads, one a revision: for an explorer a snapshot and a delta."""
    publications = Publications(publish)
    made = [publications.publish(one) for one in revisions]
    return {role: [one.payload(role) for one in made] for role in (EXPLORER, REGENERATOR)}


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
        velocities.append(session.probe(model))
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
        again = graphs[1] == graphs[0] > 0
        measures.append(
            is_true(f"{role}: nothing was compiled again", again, "compiling takes longer than an iteration")
        )
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

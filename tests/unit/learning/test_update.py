"""One update by one rank: against plain autograd and AdamW, its order of things, its refusals, its state.

The process group has one member here; two real processes are in tests/system/test_learner_group.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from solrl_ray import models
from solrl_ray.config.schema import Config, LearnerConfig, SigmaSchedule
from solrl_ray.errors import RunError, UserError
from solrl_ray.learning.batches import gather, rank_slots, rewards_and_groups
from solrl_ray.learning.engine import Engine
from solrl_ray.learning.learner import Learner
from solrl_ray.learning.state import LearnerState
from solrl_ray.objectives import load as load_objective
from solrl_ray.objectives.advantages import advantages
from solrl_ray.objectives.base import Velocities
from solrl_ray.objectives.schedules import learning_rate
from solrl_ray.policy import adapters
from solrl_ray.policy.digest import lora_digest
from solrl_ray.records import SampleGroup, SampleShape
from solrl_ray.sampling.schedules import sigmas
from tests.support.learning import config, embeddings, groups
from tests.support.tiny import model_config

CPU = torch.device("cpu")
Build = Callable[..., Learner]
RISE_AND_FALL = {"warmup": 1, "decay": "cosine", "steps": 4, "floor": 0.1}


def load(settings: Config) -> models.DiffusionModel:
    return models.load(settings.model, CPU, components={"transformer"})


@pytest.fixture
def build(group_of_one: None, tiny_pipeline: Path) -> Iterator[Build]:
    """Make a learner of the tiny pipeline from `tests.support.learning.config`'s arguments."""
    built = []

    def make(**sections: Any) -> Learner:
        settings = config(tiny_pipeline, **sections)
        built.append(Learner(settings, load(settings), 0, 1))
        return built[-1]

    yield make
    for learner in built:
        learner.close()


def run(learner: Learner, updates: int, first: int = 0) -> Learner:
    for iteration in range(first, first + updates):
        learner.update(iteration, groups(iteration), embeddings())
    return learner


SHAPES = (SampleShape(16, 16), SampleShape(8, 32), SampleShape(8, 24))
"""Of 16, 16 and 12 image tokens."""


def of_shapes(made: list[SampleGroup]) -> list[SampleGroup]:
    """A shape for each prompt."""
    tokens = (16, 16, 12)
    return [
        replace(group, shape=shape, latents=group.latents[:, :count])
        for group, shape, count in zip(made, SHAPES, tokens, strict=True)
    ]


@pytest.mark.parametrize("several", [False, True], ids=["one shape", "three shapes"])
def test_an_update_is_adamw_on_the_clipped_mean_gradient_over_samples_and_timesteps(
    build: Build, tiny_pipeline: Path, several: bool
) -> None:
    # 10 samples in micro-batches of 4: the third is half filled. Plain autograd takes all ten, or a prompt's, at once.
    shapes = [(shape.height, shape.width) for shape in SHAPES] if several else 16
    section = model_config(tiny_pipeline, resolution=shapes, schedule=SigmaSchedule(kind="flux"))
    made = of_shapes(groups(0)) if several else groups(0)
    learner = build(learner={"gradient_clip": 1e-3}, model=section)
    metrics = learner.update(0, made, embeddings())

    settings = config(tiny_pipeline, model=section)
    model = load(settings)
    adapters.attach(model.transformer, settings.model.lora, settings.run.seed)
    trained = adapters.parameters(model.transformer, "default")
    rewards, positions = rewards_and_groups(made)
    gains = torch.from_numpy(advantages(rewards, positions, settings.objective.advantage))
    there = [(group, k) for group in made for k in range(len(group.indices))]
    losses = []
    for part in (range(4), range(4, 7), range(7, 10)) if several else (range(10),):
        (slots,) = rank_slots([part], micro_batch=len(part), rank=0, world_size=1)
        batch = gather([*there[: part.stop]], slots)
        of_shape = model.of_shape(there[part.start][0].shape) if several else model
        objective = load_objective(settings, sigmas(settings.model.schedule, 5, of_shape.image_tokens))
        for one in objective.passes(batch, CPU, 0):
            embedding = model.batch_embeddings([embeddings()[p] for p in batch.prompt_ids])
            v_theta = of_shape.velocity(one.x_t, one.t, embedding)
            same = v_theta.detach()  # B is zero: all three policies are the base
            losses.append(objective.loss(one, Velocities(theta=v_theta, old=same, base=same), gains[list(part)]).total)
    mean = torch.cat(losses).mean()
    mean.backward()
    norm = torch.nn.utils.clip_grad_norm_(trained.values(), 1e-3)
    torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=1e-4).step()

    assert norm > 1e-3
    assert metrics.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
    assert metrics.loss == pytest.approx(mean.item(), rel=1e-6)
    found = learner.factors("default")
    for name, value in trained.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-3, atol=1e-6)


def test_samples_of_a_shape_that_is_not_the_runs_are_refused(build: Build, tiny_pipeline: Path) -> None:
    shapes = [(shape.height, shape.width) for shape in SHAPES]
    learner = build(model=model_config(tiny_pipeline, resolution=shapes))
    other = [replace(group, shape=SampleShape(32, 8)) for group in of_shapes(groups(0))]
    with pytest.raises(RunError, match=r"prompt p0 in iteration 0 have the shape 32 x 8 px, which is not in model"):
        learner.update(0, other, embeddings())


@pytest.mark.parametrize(
    ("sections", "early"),
    [
        ({}, 0),  # global std: advantages wait for the last reward
        ({"objective": {"advantage": {"std": "group"}}}, 1),
        ({"objective": {"advantage": {"std": "group"}}, "learner": {"updates": 3}}, 0),  # its part's last one
        ({"objective": {"advantage": {"std": "group"}, "clip_range": 0.1}, "learner": {"epochs": 2}}, 1),
    ],
    ids=["std global", "std group", "three steps", "two epochs"],
)
def test_samples_that_come_one_prompt_at_a_time_are_learned_from_early_to_the_same_bits(
    build: Build, sections: dict[str, Any], early: int
) -> None:
    at_once, bit_by_bit = run(build(**sections), 2), build(**sections)
    for iteration in (0, 1):
        made = groups(iteration)
        for place in range(len(made)):
            bit_by_bit.begin(iteration, [len(group.indices) for group in made])
            assert bit_by_bit.taken == place
            bit_by_bit.add_groups(made[place : place + 1], embeddings())
            if place == 0:  # its four samples are a micro-batch
                part = bit_by_bit._opened().parts[0]
                assert (part.sums.passes, len(part.prepared)) == (early * 3, 1 - early)
        bit_by_bit.finish(iteration)
    for policy in ("default", "old", "ema"):
        assert lora_digest(bit_by_bit.factors(policy)) == lora_digest(at_once.factors(policy))


def test_an_update_refuses_what_does_not_belong_to_it(build: Build) -> None:
    learner, made = build(), groups(0)
    with pytest.raises(RunError, match="no update is open"):
        learner.finish(0)
    learner.begin(0, [len(group.indices) for group in made])
    with pytest.raises(RunError, match="of iteration 0 is open; 1 cannot begin"):
        learner.begin(1, [1])
    learner.add_groups(made[:1], embeddings())
    with pytest.raises(RunError, match="of iteration 0, has 1 of 3 prompts"):
        learner.finish(0)
    with pytest.raises(RunError, match="number 2, p1, has 2 samples, expected 3"):
        learner.add_groups(groups(0, sizes=(4, 2, 3))[1:2], embeddings())
    learner.add_groups(made[1:], embeddings())
    assert learner.finish(0).samples == 10


@pytest.mark.parametrize(("std", "early"), [("global", False), ("group", True)])
def test_ranks_with_different_samples_refuse_further_updates_if_gradients_were_made_early(
    build: Build, monkeypatch: pytest.MonkeyPatch, std: str, early: bool
) -> None:
    learner, made = build(objective={"advantage": {"std": std}}), groups(0)

    def differ(value: int) -> None:
        raise RunError("the ranks were given different samples")

    learner.begin(0, [len(group.indices) for group in made])
    for group in made:
        learner.add_groups([group], embeddings())
    with monkeypatch.context() as patch:
        patch.setattr(learner, "_check_ranks_agree", differ)
        with pytest.raises(RunError, match="different samples"):
            learner.finish(0)
    if early:
        with pytest.raises(RunError, match="half-way"):
            learner.finish(0)
    else:
        assert learner.finish(0).samples == 10


def test_metrics_say_what_was_learned_from(build: Build) -> None:
    metrics = build().update(0, groups(0), embeddings())
    assert (metrics.samples, metrics.passes, metrics.revision) == (10, 9, 1)
    assert metrics.kl == 0.0
    assert metrics.loss == metrics.policy_loss


def test_a_learner_compiles_none_of_the_optimisers_that_deepspeed_knows(build: Build) -> None:
    before = dict(os.environ)
    build()
    from deepspeed.runtime.zero.muon.original_muon import muon_update  # after DeepSpeed's own import of it

    assert not hasattr(muon_update, "_torchdynamo_orig_callable")
    assert dict(os.environ) == before


def test_rates_and_decays_are_of_the_optimisers_steps_of_which_an_update_may_make_several(
    build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    learner = build(
        learner={"updates": 2, "schedule": {"warmup": 8}},
        objective={"old_decay": {"kind": "linear", "slope": 0.1, "cap": 0.9}},
    )
    averages: list[float] = []
    rates: list[float] = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self, lr: (rates.append(lr), step(self, lr))[1])
    update = adapters.Ema.update
    monkeypatch.setattr(
        adapters.Ema, "update", lambda self, trained, decay: (averages.append(decay), update(self, trained, decay))
    )
    run(learner, 1).state().save(tmp_path / "half")
    learner.load(LearnerState.load(tmp_path / "half"))
    before = learner.factors("old")
    run(learner, 1, first=1)
    assert averages == pytest.approx([2 / 11, 3 / 12, 4 / 13, 5 / 14])  # (1 + s) / (10 + s)
    assert rates == pytest.approx([rate * rates[-1] for rate in (1 / 4, 2 / 4, 3 / 4, 1)])
    trained, old = learner.factors("default"), learner.factors("old")
    for name in before:  # after four steps
        torch.testing.assert_close(old[name], 0.4 * before[name] + 0.6 * trained[name])
    assert (learner.state().updates, learner.state().steps) == (2, 4)


def test_taking_v_theta_for_v_old_where_they_are_equal_changes_no_bit(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = {"old_decay": {"kind": "copy"}}
    quick = build(objective=copy)
    assert quick._old_is_default()
    run(quick, 2)
    assert quick._old_is_default()
    slow = build(objective=copy)
    monkeypatch.setattr(slow, "_old_is_default", lambda: False)
    assert lora_digest(run(slow, 2).factors("default")) == lora_digest(quick.factors("default"))
    assert not run(build(), 1)._old_is_default()


def test_a_loss_that_is_not_finite_stops_the_update_before_any_weight_moves(build: Build) -> None:
    learner = run(build(), 1)
    before = learner.state()
    made = groups(1)
    made[0] = replace(made[0], latents=made[0].latents * 1e30)
    with pytest.raises(RunError, match="the loss of iteration 1 is"):
        learner.update(1, made, embeddings())
    after = learner.state()
    for part in ("default", "old", "ema", "exp_avg", "exp_avg_sq"):
        assert lora_digest(getattr(after, part)) == lora_digest(getattr(before, part))
    assert after.updates == 1
    with pytest.raises(RunError, match="failed half-way"):
        learner.update(1, groups(1), embeddings())


def test_the_engine_stops_at_a_gradient_that_is_not_finite(group_of_one: None) -> None:
    weight = torch.nn.Parameter(torch.tensor([0.0, 1.0]))
    engine = Engine.build(LearnerConfig(), [weight], lambda scale: (weight * scale).sqrt())
    engine.backward(engine.velocity(torch.ones(2)).sum(), last=True)  # d sqrt(0) is infinite, its value is not
    with pytest.raises(RunError, match="gradient"):
        engine.step(1e-3)
    assert weight.tolist() == [0.0, 1.0]
    assert engine.moments()["exp_avg"][0].tolist() == [0.0, 0.0]
    engine.close()


def test_a_schedule_is_that_of_pytorchs_classes_and_each_rollback_halves_it() -> None:
    config = LearnerConfig.model_validate({"optimizer": {"lr": 0.02}, "schedule": RISE_AND_FALL | {"warmup": 3}})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    rise = LinearLR(optimizer, start_factor=1 / 3, total_iters=2)
    fall = CosineAnnealingLR(optimizer, T_max=4, eta_min=0.002)
    scheduler, rates = SequentialLR(optimizer, [rise, fall], milestones=[3]), []
    for _ in range(7):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    found = [learning_rate(config, step) for step in range(1, 8)]
    assert found == pytest.approx(rates, rel=1e-9)
    assert [learning_rate(config, step, rollbacks=2) for step in range(1, 8)] == [rate / 4 for rate in found]


def test_samples_of_another_revision_are_refused_untouched(build: Build) -> None:
    learner = build()
    with pytest.raises(RunError, match="made in iteration 1"):
        learner.update(0, groups(1), embeddings())
    with pytest.raises(RunError, match="drawn by revision 1, not by 0"):
        learner.update(1, groups(1), embeddings())
    with pytest.raises(RunError, match="no embedding of prompt p2"):
        learner.update(0, groups(0), embeddings(2))
    run(learner, 1)  # a refusal is not a failed update


def test_a_step_has_the_learning_rate_of_its_number(build: Build) -> None:
    """B begins at zero: AdamW moves it by the learning rate in the first step, whatever the size of the gradient."""
    constant, rising = (run(build(learner=more), 1) for more in ({}, {"schedule": {"warmup": 4}}))
    moved, quarter = constant.factors("default"), rising.factors("default")
    for name in (name for name in moved if name.endswith("lora_B")):
        assert moved[name].abs().max() > 0
        torch.testing.assert_close(quarter[name], moved[name] / 4)
    gone_back = build()
    gone_back.load(replace(gone_back.state(), rollbacks=2))
    halved_twice = run(gone_back, 1).factors("default")
    assert gone_back.state().rollbacks == 2
    for name in (name for name in moved if name.endswith("lora_B")):
        torch.testing.assert_close(halved_twice[name], moved[name] / 4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"learner": {"updates": 3, "epochs": 2}},
        {"learner": {"schedule": RISE_AND_FALL}},
        {"objective": {"kind": "awm", "timesteps": 3, "anchor": {"slope": 0.2, "cap": 0.9}}},  # with a third policy
    ],
    ids=str,
)
def test_a_learner_resumed_from_disk_ends_with_the_bytes_of_an_undisturbed_one(
    build: Build, tmp_path: Path, settings: dict[str, Any]
) -> None:
    run(build(**settings), 4).state().save(tmp_path / "straight")
    run(build(**settings), 2).state().save(tmp_path / "half")
    resumed = build(**settings)
    resumed.load(LearnerState.load(tmp_path / "half"))
    assert resumed.revision == 2
    run(resumed, 2, first=2).state().save(tmp_path / "resumed")
    for name in ("policy.safetensors", "optimizer.safetensors", "state.json"):
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_loading_goes_back_in_a_learner_that_has_already_trained(build: Build) -> None:
    learner = run(build(), 2)
    halfway = learner.state()
    once = lora_digest(run(learner, 2, first=2).factors("default"))
    learner.load(halfway)
    assert lora_digest(run(learner, 2, first=2).factors("default")) == once


def test_a_state_of_another_lora_is_refused(build: Build) -> None:
    state = build().state()
    lora = {"rank": 8, "alpha": 8.0, "targets": ["to_q"]}
    with pytest.raises(UserError, match=r"model\.lora"):
        build_with_lora(build, lora).load(state)


def build_with_lora(build: Build, lora: dict[str, Any]) -> Learner:
    path = build()._config.model.path
    return build(model=model_config(path, lora=lora))


def test_a_bfloat16_base_is_trained_through_float32_factors(build: Build) -> None:
    path = build()._config.model.path
    learner = build(model=model_config(path, dtype="bfloat16"))
    metrics = learner.update(0, groups(0), embeddings())
    reference = build().update(0, groups(0), embeddings())
    assert {value.dtype for value in learner.factors("default").values()} == {torch.float32}
    assert {p.dtype for n, p in learner._model.transformer.named_parameters() if "lora" not in n} == {torch.bfloat16}
    assert metrics.loss == pytest.approx(reference.loss, rel=0.01)
    assert metrics.gradient_norm == pytest.approx(reference.gradient_norm, rel=0.1)


def test_gradient_checkpointing_changes_no_bit(build: Build) -> None:
    plain, checkpointed = (run(build(learner={"activation_memory": kept}), 2) for kept in (1, 0))
    assert checkpointed._model.transformer.is_gradient_checkpointing
    assert not plain._model.transformer.is_gradient_checkpointing
    assert lora_digest(plain.factors("default")) == lora_digest(checkpointed.factors("default"))

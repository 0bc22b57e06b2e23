"""Samples that are trained on twice, against plain autograd and AdamW."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from solrl_ray import models
from solrl_ray.learning.batches import rewards_and_groups
from solrl_ray.learning.engine import free_port, leave_process_group, process_group
from solrl_ray.learning.learner import Learner
from solrl_ray.objectives import load as load_objective
from solrl_ray.objectives.advantages import advantages
from solrl_ray.objectives.base import MicroBatch, Velocities
from solrl_ray.policy import adapters
from solrl_ray.sampling.schedules import sigmas
from tests.support.learning import config, embeddings, groups

CPU = torch.device("cpu")


def test_a_second_epoch_is_another_step_on_draws_of_its_own_within_the_bound(tiny_pipeline: Path) -> None:
    settings = config(
        tiny_pipeline, learner={"epochs": 2}, objective={"timestep_fraction": 0.6, "clip_range": 1e-3, "kl": 0.1}
    )
    made = groups(0)
    process_group(0, 1, "127.0.0.1", free_port(), device=CPU, timeout=60, one_host=True)
    learner = Learner(settings, models.load(settings.model, CPU, components={"transformer"}), 0, 1)
    metrics = learner.update(0, made, embeddings())
    found = learner.factors("default")
    learner.close()
    leave_process_group()

    model = models.load(settings.model, CPU, components={"transformer"})
    adapters.attach(model.transformer, settings.model.lora, settings.run.seed)
    trained = adapters.parameters(model.transformer, "default")
    gains = torch.from_numpy(advantages(*rewards_and_groups(made), settings.objective.advantage))
    batch = MicroBatch(  # all samples at once
        prompt_ids=tuple(group.prompt_id for group in made for _ in group.indices),
        indices=tuple(index for group in made for index in group.indices),
        x0=torch.cat([group.latents for group in made]),
        weights=torch.ones(10),
    )
    embedding = model.batch_embeddings([embeddings()[prompt_id] for prompt_id in batch.prompt_ids])
    objective = load_objective(settings, sigmas(settings.model.schedule, 5, model.image_tokens))
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=1e-4)
    norms, means, clipped = [], [], []
    for epoch in (0, 1):
        losses = []
        for one in objective.passes(batch, CPU, 0, epoch):
            with torch.no_grad(), adapters.using(model.transformer, "base"):  # of which `old` is a copy
                base = model.velocity(one.x_t, one.t, embedding)
            v = Velocities(theta=model.velocity(one.x_t, one.t, embedding), old=base, base=base)
            losses.append(objective.loss(one, v, gains))
        mean = torch.stack([loss.total for loss in losses]).mean()
        optimizer.zero_grad()
        mean.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0).item())
        means.append(mean.item())
        clipped.append(np.mean([loss.clipped for loss in losses]))
        optimizer.step()

    assert clipped[0] == 0 < clipped[1]  # in the first epoch no velocity has moved
    assert metrics.clip_fraction == pytest.approx(np.mean(clipped))
    assert metrics.gradient_norm == pytest.approx(np.mean(norms), rel=1e-4)
    assert metrics.loss == pytest.approx(np.mean(means), rel=1e-5)
    for name, value in trained.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-3, atol=1e-5)

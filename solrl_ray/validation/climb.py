"""Whether a few updates raise what they are rewarded for.

An objective can be right and not fit a checkpoint: users saw DiffusionNFT lower every reward on Z-Image. Nothing that
needs no training showed such a fall beforehand (docs/decisions/z-image.md), so this step trains.
"""

from __future__ import annotations

import numpy as np
import torch

from solrl_ray.config.samplers import Ode
from solrl_ray.policy import adapters
from solrl_ray.rollout.sampler import Sampler
from solrl_ray.validation.roles import alone
from solrl_ray.validation.session import PROMPTS, Brightness, Session
from solrl_ray.validation.steps import Measure, at_least

UPDATES = 8
SEEDS = tuple(range(8))
"""Of each prompt, in each update."""
MEASURED = tuple(range(32))
"""Of each prompt, at the addresses of evaluations."""
FALL = -2.0
"""Standard errors over pictures. Updates without any effect fall by as much in 2 of 100 cases."""


def climb(session: Session) -> list[Measure]:
    """On-policy updates with the pictures' brightness as reward, which is compared on the same noise before and after.

    Not compiled, because batches have other shapes than a run's.
    """
    session.release()
    eager = {"compile.enabled": False, "compile.learner": False, "learner.micro_batch": len(SEEDS)}
    settings = session.config.changed(eager)
    steps, record = settings.rollout.regenerate.steps, settings.objective.needs_trajectory
    with alone(session, settings, "transformer", "vae") as (model, learner):
        reward, size = Brightness("brightness"), len(SEEDS)
        sampler = Sampler(settings, model, reward, steps=steps, micro_batch=size, record=record)
        measuring = Sampler(settings, model, reward, steps=steps, micro_batch=size, sampler=Ode())

        def brightness() -> np.ndarray:
            with adapters.using(model.transformer, "old"):
                drawn = [session.sample(measuring, prompt, stage="evaluate", indices=MEASURED)[0] for prompt in PROMPTS]
            return torch.cat([each.rewards for each in drawn]).double().numpy()

        before = brightness()
        for update in range(UPDATES):
            with adapters.using(model.transformer, "old"):
                made = [session.sample(sampler, prompt, iteration=update, indices=SEEDS)[1] for prompt in PROMPTS]
            learner.update(update, made, session.embeddings)
        change = brightness() - before
    error = change.std(ddof=1) / len(change) ** 0.5
    why = "a reward that falls in its first updates falls in a run: try another objective"
    return [
        Measure("objective", settings.objective.kind),
        Measure(f"brightness before {UPDATES} updates", float(before.mean())),
        Measure("change of the brightness", float(change.mean())),
        at_least("change in standard errors", float(change.mean() / max(error, 1e-12)), FALL, why),
    ]

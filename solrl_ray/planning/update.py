"""What a learner's update consists of, by the configuration: its passes, policies, rounds and memory."""

from __future__ import annotations

import math

from solrl_ray.config.schema import Config

FLOAT32_BYTES = 4
POLICIES = 3
"""Sets of LoRA factors on a learner rank: the trained policy, the sampling policy, the EMA; an anchor is a fourth."""
MOMENTS = 2
"""AdamW's moments of a trained parameter."""


def trained_timesteps(config: Config) -> int:
    """Noise levels or stored transitions on which each sample is trained, one pass each."""
    steps, objective = config.rollout.regenerate.steps, config.objective
    levels, transitions = (len(objective.trained(n)) for n in (steps, config.rollout.sampler.recorded(steps)))
    return objective.passes(levels, transitions)


def references(config: Config) -> list[str]:
    """Policies whose velocities are computed without gradient in any optimiser step, by their names in `adapters`."""
    objective = config.objective
    moves = not objective.old_decay.is_copy or config.learner.optimizer_steps > 1
    return [*objective.references(), *["old"] * moves]


def passes(config: Config) -> tuple[str, ...]:
    """The policies of a learner's passes through the transformer: those without gradient first, ``default`` with
    gradient last. A copied ``old`` differs from ``default`` only where a run begins with another's state.
    """
    names = references(config)
    copied = ["old"] if config.run.init and "old" not in names else []
    return (*names, *copied, "default")


def trains_guided_velocity(config: Config) -> bool:
    """Whether learners compute guided velocities: each has a forward of the negative prompt, without gradient."""
    return config.model.cfg.is_on and config.objective.trains_guided_velocity


def micro_batches(config: Config) -> int:
    """Of a rank, in all optimiser steps of an iteration; each is trained on at every trained timestep."""
    learner = config.learner
    return learner.optimizer_steps * rounds(config, config.rollout.prompts // learner.updates)


def backwards(config: Config) -> int:
    """A rank's passes with gradient, of an iteration."""
    return micro_batches(config) * trained_timesteps(config)


def forwards_without_gradient(config: Config) -> int:
    """One a reference and pass; a copied sampling policy is v_theta until the first optimiser step. With guided
    velocities one more for each of these, and for each pass with gradient.
    """
    steps, trained = config.learner.optimizer_steps, backwards(config)
    old = trained // steps * (steps - 1) if config.objective.old_decay.is_copy else trained
    compared = trained * len(config.objective.references()) + old
    return 2 * compared + trained if trains_guided_velocity(config) else compared


def rounds(config: Config, prompts: int) -> int:
    """Micro-batches of a rank for the samples of as many prompts. With several shapes none has two prompts."""
    rollout, learner = config.rollout, config.learner
    if len(config.model.shapes) == 1:
        return math.ceil(prompts * rollout.keep / (learner.micro_batch * learner.world_size))
    return math.ceil(prompts * math.ceil(rollout.keep / learner.micro_batch) / learner.world_size)


def latents_a_sample(config: Config) -> int:
    """Latents of a sample at the learner: its clean one, and the states of a stored trajectory."""
    transitions = config.rollout.sampler.recorded(config.rollout.regenerate.steps)
    return 1 + (transitions + 1) * config.objective.needs_trajectory


def training_bytes(config: Config, factors: int) -> int:
    """Bytes on one rank for `factors` trained parameters; ZeRO gives each rank its share of AdamW's tensors."""
    policies = POLICIES + (config.objective.anchor_decay() is not None)
    shared = (1 + MOMENTS) * math.ceil(factors / config.learner.world_size)
    return FLOAT32_BYTES * ((policies + 1) * factors + shared)

"""Counts of a learner's update from the configuration: passes, policies, rounds and memory."""

from __future__ import annotations

import math

from solrl_ray.config.schema import Config

FLOAT32_BYTES = 4
POLICIES = 3
"""Sets of LoRA factors on a learner rank: trained policy, sampling policy, EMA. An anchor adds a fourth."""
MOMENTS = 2
"""AdamW's moments per trained parameter."""


def trained_timesteps(config: Config) -> int:
    """Training passes per sample, one for each trained noise level or stored transition."""
    steps, objective = config.rollout.regenerate.steps, config.objective
    levels, transitions = (len(objective.trained(n)) for n in (steps, config.rollout.sampler.recorded(steps)))
    return objective.passes(levels, transitions)


def references(config: Config) -> list[str]:
    """Policies whose velocities an optimiser step may compute without gradient, by their names in `adapters`."""
    objective = config.objective
    differs = not objective.old_decay.is_copy or config.learner.optimizer_steps > 1
    return [*objective.references(), *["old"] * differs]


def passes(config: Config) -> tuple[str, ...]:
    """Policies of a learner's passes through the transformer: first those without gradient, last ``default`` with
    gradient. A copied ``old`` differs from ``default`` only if the run starts from another run's state.
    """
    names = references(config)
    copied = ["old"] if config.run.init and "old" not in names else []
    return (*names, *copied, "default")


def trains_guided_velocity(config: Config) -> bool:
    """Whether learners compute guided velocities, which need a forward of the negative prompt without gradient."""
    return config.model.cfg.is_on and config.objective.trains_guided_velocity


def micro_batches(config: Config) -> int:
    """Micro-batches per rank in all optimiser steps of an iteration. Each one is trained at every trained timestep."""
    learner = config.learner
    return learner.optimizer_steps * rounds(config, config.rollout.prompts // learner.updates)


def backwards(config: Config) -> int:
    """Passes with gradient per rank and iteration."""
    return micro_batches(config) * trained_timesteps(config)


def forwards_without_gradient(config: Config) -> int:
    """Forwards without gradient per rank and iteration: one per reference policy and pass. A copied sampling policy
    needs none until the first optimiser step, because it equals v_theta. Guided velocities need one more for each of
    these forwards and for each pass with gradient.
    """
    steps, trained = config.learner.optimizer_steps, backwards(config)
    old = trained // steps * (steps - 1) if config.objective.old_decay.is_copy else trained
    compared = trained * len(config.objective.references()) + old
    return 2 * compared + trained if trains_guided_velocity(config) else compared


def rounds(config: Config, prompts: int) -> int:
    """Micro-batches per rank for the samples of `prompts` prompts. With several shapes, a micro-batch has samples of
    only one prompt.
    """
    rollout, learner = config.rollout, config.learner
    if len(config.model.shapes) == 1:
        return math.ceil(prompts * rollout.keep / (learner.micro_batch * learner.world_size))
    return math.ceil(prompts * math.ceil(rollout.keep / learner.micro_batch) / learner.world_size)


def latents_a_sample(config: Config) -> int:
    """Latents per sample at the learner: the clean latent, and the states of a stored trajectory."""
    transitions = config.rollout.sampler.recorded(config.rollout.regenerate.steps)
    return 1 + (transitions + 1) * config.objective.needs_trajectory


def training_bytes(config: Config, factors: int) -> int:
    """Bytes per rank for `factors` trained parameters. ZeRO shards AdamW's tensors over the ranks."""
    policies = POLICIES + (config.objective.anchor_decay() is not None)
    shared = (1 + MOMENTS) * math.ceil(factors / config.learner.world_size)
    return FLOAT32_BYTES * ((policies + 1) * factors + shared)

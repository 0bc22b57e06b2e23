"""Advice in a plan: idle explorers, and padded images and samples."""

from __future__ import annotations

import math

from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import is_one_stage, pool_sampling
from solrl_ray.planning.update import rounds

PADDING_WARN = 0.25
"""Share of padding from which a plan mentions it."""


def advice(config: Config) -> tuple[str, ...]:
    """Sentences that suggest a better setting. The configuration must have passed `checks.check`."""
    sentences = [_idle_explorers(config)]
    if not is_one_stage(config):
        sentences.append(_padding(config, "images are regenerated", "rollout.regenerate.micro_batch"))
    sentences.append(_padded_samples(config))
    return tuple(filter(None, sentences))


def _idle_explorers(config: Config) -> str:
    """A sentence if an iteration has fewer units than explorers; else empty."""
    sampling, rollout, explorers = pool_sampling(config), config.rollout, config.fleet.explorers.count
    units = rollout.prompts * sampling.units
    if units >= explorers:
        return ""
    cut = rollout.preview.unit is not None or sampling.prune
    key = "rollout.preview.unit" if cut else "rollout.explore.micro_batch"
    if is_one_stage(config):
        key = "rollout.regenerate.micro_batch"
    return (
        f"{explorers - units} of {explorers} explorers are idle, because an iteration has {units} units ({key} is "
        f"{sampling.unit}); {units} explorers are equally fast"
    )


def _padded_samples(config: Config) -> str:
    """A sentence if a learner's micro-batches are not full; else empty. With several shapes, a micro-batch has samples
    of only one prompt.
    """
    if len(config.model.shapes) > 1:
        return _padding(config, "samples are trained on", "learner.micro_batch")
    learner, rollout = config.learner, config.rollout
    prompts = rollout.prompts // learner.updates
    made, samples = rounds(config, prompts), prompts * rollout.keep
    computed = made * learner.world_size * learner.micro_batch
    better = math.ceil(samples / (learner.world_size * made))
    if 1 - samples / computed < PADDING_WARN or better == learner.micro_batch:
        return ""
    return (
        f"an optimiser step computes {computed} samples, of which {computed - samples} are padding, because it has "
        f"{samples} samples for {learner.world_size} ranks with learner.micro_batch {learner.micro_batch}; "
        f"learner.micro_batch={better} saves that time"
    )


def _padding(config: Config, what: str, key: str) -> str:
    """A sentence if the kept seeds do not fill their micro-batches; else empty. The suggested size needs the same
    number of forwards.
    """
    keep, size = config.rollout.keep, config.value_of(key)
    forwards = math.ceil(keep / size)
    if 1 - keep / (forwards * size) < PADDING_WARN:
        return ""
    return (
        f"for each prompt {forwards * size} {what}, of which {forwards * size - keep} are padding, "
        f"because rollout.keep is {keep} and {key} {size}; {key}={math.ceil(keep / forwards)} saves that time"
    )

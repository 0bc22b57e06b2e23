"""Advice of a plan: explorers without work, and images and samples that are padding."""

from __future__ import annotations

import math

from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import is_one_stage, pool_sampling
from solrl_ray.planning.update import rounds

PADDING_WARN = 0.25
"""Share from which padding is worth a sentence."""


def advice(config: Config) -> tuple[str, ...]:
    """Sentences with the setting that is better. The configuration must have passed `checks.check`."""
    said = [_idle_explorers(config)]
    if not is_one_stage(config):
        said.append(_padding(config, "images are regenerated", "rollout.regenerate.micro_batch"))
    said.append(_padded_samples(config))
    return tuple(filter(None, said))


def _idle_explorers(config: Config) -> str:
    """If an iteration has fewer units than there are explorers."""
    sampling, rollout, explorers = pool_sampling(config), config.rollout, config.fleet.explorers.count
    units = rollout.prompts * sampling.units
    if units >= explorers:
        return ""
    cut = rollout.preview.unit is not None or sampling.prune
    key = "rollout.preview.unit" if cut else "rollout.explore.micro_batch"
    if is_one_stage(config):
        key = "rollout.regenerate.micro_batch"
    return (
        f"{explorers - units} of {explorers} explorers have no work, because an iteration has {units} units ({key} is "
        f"{sampling.unit}); {units} explorers are as fast"
    )


def _padded_samples(config: Config) -> str:
    """If a learner's micro-batches are not filled. With several shapes they have samples of one prompt."""
    if len(config.model.shapes) > 1:
        return _padding(config, "samples are learned from", "learner.micro_batch")
    learner, rollout = config.learner, config.rollout
    prompts = rollout.prompts // learner.updates
    made, samples = rounds(config, prompts), prompts * rollout.keep
    places = made * learner.world_size * learner.micro_batch
    better = math.ceil(samples / (learner.world_size * made))
    if 1 - samples / places < PADDING_WARN or better == learner.micro_batch:
        return ""
    return (
        f"an optimiser step computes {places} samples, and {places - samples} of them are padding, because it has "
        f"{samples} for {learner.world_size} ranks with a learner.micro_batch of {learner.micro_batch}; "
        f"learner.micro_batch={better} saves that time"
    )


def _padding(config: Config, what: str, key: str) -> str:
    """If the kept seeds do not fill their micro-batches. The size that is named takes as many forwards."""
    keep, size = config.rollout.keep, config.value_of(key)
    forwards = math.ceil(keep / size)
    if 1 - keep / (forwards * size) < PADDING_WARN:
        return ""
    return (
        f"for each prompt {forwards * size} {what}, and {forwards * size - keep} of them are padding, "
        f"because rollout.keep is {keep} and {key} {size}; {key}={math.ceil(keep / forwards)} saves that time"
    )

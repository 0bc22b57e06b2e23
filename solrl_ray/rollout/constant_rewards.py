"""A warning about rewards that are the same for every sample of a prompt: such prompts teach nothing.

The advantage of a sample is the distance from its prompt's mean reward, so it is 0 (`objectives.advantages`).
"""

from __future__ import annotations

from collections.abc import Sequence

from solrl_ray.config.problems import listed
from solrl_ray.config.schema import Config
from solrl_ray.metrics.records import IterationMetrics


def constant_rewards(config: Config, records: Sequence[IterationMetrics]) -> str:
    """The warning about these iterations, with how often it happened; empty if it never did."""
    prompts = config.rollout.prompts * len(records)
    groups, pools = sum(r.constant_groups for r in records), sum(r.constant_pools for r in records)
    if not groups and not pools:
        return ""
    named = [f"rewards.{i} ({reward.kind})" for i, reward in enumerate(config.rewards)]
    said = [f"Constant reward: {named[0] if len(named) == 1 else f'the sum of {listed(named)}'}"]
    if groups:
        said.append(
            f"was the same for all samples of a prompt in {groups} of {prompts} cases. Their advantage is 0, so the "
            "reward teaches nothing there."
        )
    if pools:
        said.append(
            f"{'It was' if groups else 'was'} the same for all finished previews of a prompt in {pools} of {prompts} "
            "cases. Their seeds were chosen by number."
        )
    return " ".join(said)


def news(config: Config, records: Sequence[IterationMetrics]) -> str:
    """The warning about the newest iteration, if it is worse than all before; else empty.

    Some prompts with constant rewards are bad, all prompts of an iteration are worse.
    """
    most = [max(record.constant_groups, record.constant_pools) for record in records]
    *before, newest = ((count > 0) + (count == config.rollout.prompts) for count in most)
    return constant_rewards(config, records[-1:]) if newest > max(before, default=0) else ""

"""Warning about constant rewards: a prompt whose samples all have the same reward gives no gradient.

An advantage is a sample's distance from the mean reward of its prompt, hence 0 here (`objectives.advantages`).
"""

from __future__ import annotations

from collections.abc import Sequence

from solrl_ray.config.problems import listed
from solrl_ray.config.schema import Config
from solrl_ray.metrics.records import IterationMetrics


def constant_rewards(config: Config, records: Sequence[IterationMetrics]) -> str:
    """The warning about these iterations, with the number of cases; empty if no reward was constant."""
    prompts = config.rollout.prompts * len(records)
    groups, pools = sum(r.constant_groups for r in records), sum(r.constant_pools for r in records)
    if not groups and not pools:
        return ""
    named = [f"rewards.{i} ({reward.kind})" for i, reward in enumerate(config.rewards)]
    sentences = [f"Constant reward: {named[0] if len(named) == 1 else f'the sum of {listed(named)}'}"]
    if groups:
        sentences.append(
            f"was the same for all samples of a prompt in {groups} of {prompts} cases. Their advantage is 0, so the "
            "model learns nothing from them."
        )
    if pools:
        sentences.append(
            f"{'It was' if groups else 'was'} the same for all finished previews of a prompt in {pools} of {prompts} "
            "cases. Their seeds were chosen by number."
        )
    return " ".join(sentences)


def news(config: Config, records: Sequence[IterationMetrics]) -> str:
    """The warning about the newest iteration, if it is worse than every earlier one; else empty.

    There are three levels: no prompt has constant rewards, some have, all have.
    """
    most = [max(record.constant_groups, record.constant_pools) for record in records]
    *before, newest = ((count > 0) + (count == config.rollout.prompts) for count in most)
    return constant_rewards(config, records[-1:]) if newest > max(before, default=0) else ""

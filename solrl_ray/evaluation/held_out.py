"""Held-out evaluation: its work units, its metrics, and real images for comparison."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from solrl_ray.config.rewards import RewardConfig
from solrl_ray.config.schema import Config
from solrl_ray.learning.state import LearnerState, Tensors
from solrl_ray.metrics.records import EvaluationMetrics
from solrl_ray.policy.adapters import base_factors
from solrl_ray.prompts.prompt_set import shape_of
from solrl_ray.records import Prompt, PromptEmbedding, SampleShape, WorkUnit
from solrl_ray.rewards.callables import real_pictures
from solrl_ray.rollout.sampler import addresses
from solrl_ray.weight_sync.manifest import Policy

EVAL_POLICIES: tuple[Policy, ...] = ("base", "default", "ema")
"""Policies that can be evaluated from a checkpoint."""

UNIT_POLICY = {"real": "real", "base": "old", "ema": "ema"}
"""Evaluated policy → policy named in the work units.

Evaluations after the same update use different names, so that a late result of one cannot be mistaken for a result of
another. The base is evaluated as revision 0 of the sampling policy, which equals it.
"""


def policy_factors(state: LearnerState, policy: str) -> Tensors:
    """LoRA factors of a policy in `EVAL_POLICIES`; for the base, B = 0."""
    if policy == "base":
        return base_factors(state.default)
    factors: Tensors = getattr(state, policy)
    return factors


def reward_names(rewards: Sequence[RewardConfig]) -> list[str]:
    """A short, unique name for each reward: its kind, followed by its path or position if kinds repeat."""
    names: list[str] = []
    for position, reward in enumerate(rewards):
        same = [other for other in rewards if other.kind == reward.kind]
        name = reward.kind if len(same) == 1 else f"{reward.kind} {Path(reward.path).name}".strip()
        names.append(name if name not in names else f"{name} {position + 1}")
    return names


def evaluation_units(config: Config, prompts: Sequence[Prompt], *, updates: int, policy: str) -> list[WorkUnit]:
    """Work units of an evaluation. Each covers the prompts of one shape that share a forward pass.

    Addresses (and so the noise) are the same in every evaluation.

    Args:
        updates: number of updates before the evaluation; also the revision.
        policy: policy to sample from: ``old``, ``ema``, ``base`` or ``default``; ``real`` for real images.
    """
    evaluation, of_shape = config.evaluation, defaultdict[SampleShape, list[str]](list)
    for prompt in prompts:
        of_shape[shape_of(prompt, config.model.shapes, config.run.seed)].append(prompt.id)
    # Real images need no forward pass, so batching them gains nothing.
    most = 1 if policy == UNIT_POLICY["real"] else evaluation.prompts_at_once
    groups = [ids[first : first + most] for ids in of_shape.values() for first in range(0, len(ids), most)]
    return [
        WorkUnit(
            stage="evaluate",
            iteration=updates,
            revision=updates,
            prompt_id=first,
            indices=tuple(range(evaluation.samples)),
            policy=policy,
            beside=tuple(beside),
        )
        for first, *beside in groups
    ]


def evaluation_metrics(
    rewards: Mapping[str, tuple[float, ...]],
    *,
    updates: int,
    policy: str,
    seconds: float,
    captions: dict[str, str],
    overlapped: bool = False,
    reward_costs: Mapping[str, int] | None = None,
) -> EvaluationMetrics:
    """The record of an evaluation, with mean and standard error over prompts of each prompt's mean reward.

    Args:
        updates: number of updates before the evaluation.
        rewards: prompt id → rewards of its addresses.
        reward_costs: use of reward servers and judges.
    """
    means = np.array([np.mean(values, dtype=np.float64) for _, values in sorted(rewards.items())])
    stderr = float(np.std(means, ddof=1) / math.sqrt(len(means))) if len(means) > 1 else 0.0
    return EvaluationMetrics(
        iteration=updates,
        policy=policy,
        reward_mean=float(means.mean()),
        reward_stderr=stderr,
        rewards=dict(rewards),
        seconds=seconds,
        captions=captions,
        overlapped=overlapped,
        reward_costs=dict(reward_costs or {}),
    )


def reference_pictures(
    config: Config, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding | None = None
) -> torch.Tensor:
    """Real images for a prompt, one per evaluation address: float32 [n, 3, H, W] in [0, 1].

    Raises the errors of `real_pictures`.
    """
    unit_addresses = addresses(unit, config.run.seed)
    stored = embedding.references if embedding is not None else None
    references = stored.float() / 255 if stored is not None else None
    return real_pictures(config.evaluation, "evaluation.reference", prompt.text, unit_addresses, references)

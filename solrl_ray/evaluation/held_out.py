"""Held-out evaluation: its units, its metrics, and real pictures for comparison."""

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
"""What a run's evaluations score → the policy of their units. It differs between evaluations after the same update, so
that a late answer to one is no answer to the other. The sampling policy's revision 0 is the base.
"""


def policy_factors(state: LearnerState, policy: str) -> Tensors:
    """The factors of a policy in `EVAL_POLICIES`; the base's have B = 0."""
    if policy == "base":
        return base_factors(state.default)
    factors: Tensors = getattr(state, policy)
    return factors


def reward_names(rewards: Sequence[RewardConfig]) -> list[str]:
    """A short, unique name for each reward: its kind, with path and index where needed."""
    names: list[str] = []
    for position, reward in enumerate(rewards):
        same = [other for other in rewards if other.kind == reward.kind]
        name = reward.kind if len(same) == 1 else f"{reward.kind} {Path(reward.path).name}".strip()
        names.append(name if name not in names else f"{name} {position + 1}")
    return names


def evaluation_units(config: Config, prompts: Sequence[Prompt], *, updates: int, policy: str) -> list[WorkUnit]:
    """One unit for as many prompts of one shape as share a forward: their fixed addresses, the same in every
    evaluation.

    Args:
        updates: updates done; also the revision.
        policy: whose samples are scored: ``old``, ``ema``, ``base`` or ``default``; ``real`` for real pictures.
    """
    evaluation, of_shape = config.evaluation, defaultdict[SampleShape, list[str]](list)
    for prompt in prompts:
        of_shape[shape_of(prompt, config.model.shapes, config.run.seed)].append(prompt.id)
    # Pictures of a world have no forward to share.
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
    """Mean and standard error over prompts of the per-prompt mean rewards.

    Args:
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
    """Real pictures of a prompt, one per evaluation address: float32 [n, 3, H, W] in [0, 1].

    Raises as `real_pictures`.
    """
    where = addresses(unit, config.run.seed)
    seen = embedding.references if embedding is not None else None
    references = seen.float() / 255 if seen is not None else None
    return real_pictures(config.evaluation, "evaluation.reference", prompt.text, where, references)

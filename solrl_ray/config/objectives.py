"""The section `objective`: keys of DiffusionNFT, AWM, Flow-GRPO and DanceGRPO, and the passes, policies and
trajectories that each needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from solrl_ray.config.section import AboveZero, AtLeastZero, Natural, Positive, Section, Share, ShareOrZero

DEFAULT = "diffusion_nft"

Reference: TypeAlias = Literal["base", "anchor"]
"""Policies besides the trained and the sampling policy: the model without adapters, and a third adapter."""


class OldDecay(Section):
    """Update of the sampling policy `old` after every iteration: old <- d·old + (1 - d)·default, with `default` the
    trained policy.
    """

    kind: Literal["copy", "linear"] = "linear"
    """``copy``: d = 0. ``linear``: d = min(slope · optimiser steps, cap)."""
    slope: AtLeastZero = 0.001
    """For ``linear``: growth of d per optimiser step."""
    cap: ShareOrZero = 0.5
    """For ``linear``: the largest d."""

    @property
    def is_copy(self) -> bool:
        return self.kind == "copy"


class Advantage(Section):
    std: Literal["global", "group", "group_unbiased", "none", "gdpo"] = "global"
    """Divisor of (reward - group mean). ``global``: population std of the whole iteration. ``group``: population std of
    the prompt. ``group_unbiased``: std of the prompt with n - 1. ``none``: 1. ``gdpo``: each reward is divided by its
    std in the prompt, then the weighted sum by its std in the whole iteration; seeds are selected by these sums too
    (arXiv 2601.05242).
    """
    clip: AboveZero = 5.0
    """Advantages are clipped to ± this value."""

    @property
    def needs_all(self) -> bool:
        """Whether the first advantage needs the rewards of all samples of the iteration."""
        return self.std in ("global", "gdpo")


def share_of(count: int, fraction: float) -> int:
    """floor(fraction · count), at least 1, as in the papers: 0.4, 0.6 and 0.99 of 10 steps are 4, 6 and 9."""
    # Decimal, because in binary 0.29 * 100 is below 29.
    return max(1, int(Decimal(repr(float(fraction))) * count))


COPY = OldDecay(kind="copy")
"""On-policy methods sample with the trained policy."""


class Anchor(Section):
    """A third policy that slowly follows the trained policy and regularises it: anchor <- d·anchor + (1 - d)·default
    after every optimiser step.
    """

    is_copy: ClassVar[bool] = False
    weight: AtLeastZero = 1.0
    """Weight of MSE(v_theta, v_anchor); 0: no anchor."""
    slope: AtLeastZero = 0.001
    """d = min(slope · optimiser steps, cap)."""
    cap: ShareOrZero = 0.3
    """The largest d."""


class ObjectiveSection(Section):
    """Settings and requirements of an objective: passes, policies, trajectories.

    The requirements are here and not in the objective's class, because plans do not import PyTorch and samplers have no
    learner. Each kind also has `advantage` and `old_decay`, as keys or as constants.
    """

    kind: str
    implementation: ClassVar[str]
    """``module:class`` of the objective, module relative to `solrl_ray.objectives`; imported when used."""
    needs_trajectory: ClassVar[bool] = False
    """Whether the objective trains on the transitions of a stochastic sampler instead of only clean latents."""
    trains_guided_velocity: ClassVar[bool] = False
    """Whether, with `model.cfg`, the objective trains the guided velocity, with which the transitions were sampled.
    Other objectives train the velocity for the prompt only, on samples drawn with guidance.
    """
    step_range: tuple[Natural, Positive] | None = None
    """Noise levels to train on: steps low … high - 1 of the full schedule, counted from the noisiest. A
    `timestep_fraction` then refers to these steps. null: all steps; for trajectories all but the last.
    """

    def trained(self, count: int) -> range:
        """Trained steps among the first `count` steps: those in `step_range`."""
        return range(count)[slice(*self.step_range)] if self.step_range else range(count)

    def passes(self, steps: int, transitions: int) -> int:
        """Training passes per sample, one for each trained noise level or stored transition.

        Args:
            steps: Number of steps of the full schedule that are in `step_range`.
            transitions: Number of stored transitions that are in `step_range`.
        """
        raise NotImplementedError

    @property
    def is_bounded(self) -> bool:
        """Whether the objective limits how far the policy moves from the sampling policy, at any `learner.epochs`."""
        return getattr(self, "clip_range", None) is not None

    def references(self) -> tuple[Reference, ...]:
        """Policies whose velocities the loss needs, in the order of computation."""
        return ()

    def anchor_decay(self) -> Anchor | None:
        """Decay of the policy ``anchor`` after each optimiser step; None without an anchor."""
        return None

    def problems(self, steps: int) -> Iterator[tuple[str, str]]:
        """Keys of the section that are invalid for `steps` trained steps, each with a description of valid values."""
        yield from ()


class ForwardProcessSection(ObjectiveSection):
    """Base of objectives that noise clean latents."""

    shared_noise: bool = False
    """Use the same noise and noise levels for all samples of a prompt, which makes their losses easier to compare. The
    schedule is cut into as many nearly equal slices as there are noise levels, with one level from each slice (V-GRPO,
    arXiv 2604.23380).
    """


class DiffusionNftConfig(ForwardProcessSection):
    """DiffusionNFT (arXiv 2509.16117)."""

    implementation: ClassVar[str] = "nft:DiffusionNft"
    kind: Literal["diffusion_nft"] = "diffusion_nft"
    beta: AboveZero = 1.0
    """NFT mixing coefficient beta."""
    kl: AtLeastZero = 1e-4
    """Weight of MSE(v_theta, v_reference); 0 skips the reference forward."""
    clip_range: AboveZero | None = None
    """Maximum distance by which a sample can move its velocity away from v_old, as a share of the distance from v_old
    to the sample's target eps - x0. null: no limit.
    """
    timestep_fraction: Share = 0.6
    """Share of the full schedule's steps on which each sample is trained."""
    advantage: Advantage = Advantage()
    old_decay: OldDecay = OldDecay()

    def passes(self, steps: int, transitions: int) -> int:
        return share_of(steps, self.timestep_fraction)

    def references(self) -> tuple[Reference, ...]:
        return ("base",) if self.kl else ()


class AwmConfig(ForwardProcessSection):
    """Advantage-weighted matching (arXiv 2509.25050)."""

    implementation: ClassVar[str] = "awm:Awm"
    kind: Literal["awm"] = "awm"
    weighting: Literal["uniform", "huber", "ghuber"] = "ghuber"
    """Estimate of a sample's negative log-likelihood from its flow-matching error."""
    power: Share = 0.25
    """Exponent p of ``ghuber``."""
    timesteps: Positive = 6
    """Noise levels per sample. The schedule is cut into this many nearly equal slices of whole steps, with one level
    from each slice.
    """
    timestep_fraction: Share = 0.9
    """Leading share of the full schedule's steps that the slices cover."""
    skip_first: bool = False
    """Start the slices at the second step instead of at pure noise."""
    clip_range: AboveZero = 1.0
    """Ratios are clipped to 1 ± this value."""
    kl: AtLeastZero = 1e-4
    """Weight of MSE(v_theta, v_reference); 0 skips the reference forward."""
    anchor: Anchor = Anchor()
    advantage: Advantage = Advantage()
    advantage_max: AboveZero = 1.0
    """Advantages are clipped to ± `advantage.clip` and then scaled so that this limit becomes ± `advantage_max`."""
    old_decay: ClassVar[OldDecay] = COPY

    def passes(self, steps: int, transitions: int) -> int:
        return self.timesteps

    def references(self) -> tuple[Reference, ...]:
        base: tuple[Reference, ...] = ("base",) if self.kl else ()
        return (*base, "anchor") if self.anchor.weight else base

    def anchor_decay(self) -> Anchor | None:
        return self.anchor if self.anchor.weight else None

    def problems(self, steps: int) -> Iterator[tuple[str, str]]:
        levels = share_of(steps, self.timestep_fraction) - self.skip_first
        if self.timesteps > levels:
            yield (
                "timesteps",
                f"at most {levels}, the steps of rollout.regenerate that objective.timestep_fraction"
                f"{' and step_range leave' if self.step_range else ' leaves'}",
            )


class FlowGrpoConfig(ObjectiveSection):
    """Flow-GRPO (arXiv 2505.05470): clipped ratios of the stored transitions: all but the last, or those of
    `rollout.sampler.window`.
    """

    implementation: ClassVar[str] = "grpo:FlowGrpo"
    needs_trajectory: ClassVar[bool] = True
    trains_guided_velocity: ClassVar[bool] = True
    kind: Literal["flow_grpo"] = "flow_grpo"
    clip_range: AboveZero = 1e-4
    """Ratios of mean log-probabilities are clipped to 1 ± this value."""
    kl: AtLeastZero = 0.0
    """Weight of the transitions' KL divergence from the reference; 0 skips the reference forward."""
    advantage: Advantage = Advantage()
    old_decay: ClassVar[OldDecay] = COPY

    def passes(self, steps: int, transitions: int) -> int:
        return transitions

    def references(self) -> tuple[Reference, ...]:
        return ("base",) if self.kl else ()


class DanceGrpoConfig(ObjectiveSection):
    """DanceGRPO (arXiv 2505.07818): Flow-GRPO on a random share of each sample's transitions, without a KL term."""

    implementation: ClassVar[str] = "grpo:DanceGrpo"
    needs_trajectory: ClassVar[bool] = True
    trains_guided_velocity: ClassVar[bool] = True
    kind: Literal["dance_grpo"] = "dance_grpo"
    clip_range: AboveZero = 1e-4
    """Ratios of mean log-probabilities are clipped to 1 ± this value."""
    timestep_fraction: Share = 0.6
    """Share of the stored transitions to train on, drawn independently for each sample."""
    advantage: Advantage = Advantage(std="group_unbiased")
    kl: ClassVar[float] = 0.0
    old_decay: ClassVar[OldDecay] = COPY

    def passes(self, steps: int, transitions: int) -> int:
        return share_of(transitions, self.timestep_fraction)


ObjectiveConfig: TypeAlias = Annotated[
    DiffusionNftConfig | AwmConfig | FlowGrpoConfig | DanceGrpoConfig, Field(discriminator="kind")
]

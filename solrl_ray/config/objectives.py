"""The section `objective`: keys of DiffusionNFT, AWM, Flow-GRPO and DanceGRPO, and what each needs of a run."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from solrl_ray.config.section import AboveZero, AtLeastZero, Natural, Positive, Section, Share, ShareOrZero

DEFAULT = "diffusion_nft"

Reference: TypeAlias = Literal["base", "anchor"]
"""Policies beside the trained and the sampling one: the model without adapters, and a third adapter."""


class OldDecay(Section):
    """How the sampling policy follows the trained one: old <- d·old + (1 - d)·default after every iteration."""

    kind: Literal["copy", "linear"] = "linear"
    """``copy``: d = 0. ``linear``: d = min(slope · optimiser steps, cap)."""
    slope: AtLeastZero = 0.001
    """For ``linear``."""
    cap: ShareOrZero = 0.5
    """For ``linear``: the largest d."""

    @property
    def is_copy(self) -> bool:
        return self.kind == "copy"


class Advantage(Section):
    std: Literal["global", "group", "group_unbiased", "none", "gdpo"] = "global"
    """Divisor of (reward - group mean): population std of the whole iteration, of the prompt, the prompt's with
    n - 1, or 1. ``gdpo``: each of several rewards is divided by its own in the prompt before they are summed, then the
    sum by that of the whole iteration; seeds are chosen by such sums too (arXiv 2601.05242).
    """
    clip: AboveZero = 5.0
    """Advantages are clipped to ± this."""

    @property
    def needs_all(self) -> bool:
        """Whether the first advantage needs the rewards of all samples of the iteration."""
        return self.std in ("global", "gdpo")


def share_of(count: int, fraction: float) -> int:
    """floor(fraction · count), at least 1: 0.4, 0.6 and 0.99 of 10 steps are 4, 6 and 9, as published."""
    # Decimal, because in binary 0.29 * 100 is below 29.
    return max(1, int(Decimal(repr(float(fraction))) * count))


COPY = OldDecay(kind="copy")
"""On-policy methods sample with the trained policy."""


class Anchor(Section):
    """A third policy that follows the trained one and restrains it: anchor <- d·anchor + (1 - d)·default."""

    is_copy: ClassVar[bool] = False
    weight: AtLeastZero = 1.0
    """Weight of MSE(v_theta, v_anchor); 0: no anchor."""
    slope: AtLeastZero = 0.001
    """d = min(slope · optimiser steps, cap)."""
    cap: ShareOrZero = 0.3
    """The largest d."""


class ObjectiveSection(Section):
    """Settings of an objective, and its needs: passes, policies, trajectories.

    The section states these needs, not the objective's class, because a plan is made without PyTorch and samplers have
    no learner. Each kind also has `advantage` and `old_decay`, as keys or as constants.
    """

    kind: str
    implementation: ClassVar[str]
    """Module of `solrl_ray.objectives` and class, imported when used."""
    needs_trajectory: ClassVar[bool] = False
    """Whether it learns from the transitions of a stochastic sampler, not from clean latents alone."""
    trains_guided_velocity: ClassVar[bool] = False
    """Whether, with `model.cfg`, it compares guided velocities: those that made the transitions. Others train the
    velocity of the prompt alone, on samples that were drawn with guidance.
    """
    step_range: tuple[Natural, Positive] | None = None
    """Which noise levels are trained: steps low … high - 1 of the full schedule, from the noisiest on. A share of the
    steps is then one of these. null: all; of a trajectory all but the last.
    """

    def trained(self, count: int) -> range:
        """Those of the first `count` steps that are in `step_range`."""
        return range(count)[slice(*self.step_range)] if self.step_range else range(count)

    def passes(self, steps: int, transitions: int) -> int:
        """Noise levels or stored transitions on which each sample is trained, one pass each.

        Args:
            steps: of the full schedule, as many as `step_range` has.
            transitions: of a stored trajectory, likewise.
        """
        raise NotImplementedError

    @property
    def is_bounded(self) -> bool:
        """Whether samples move the policy only so far from the one that drew them, at any `learner.epochs`."""
        return getattr(self, "clip_range", None) is not None

    def references(self) -> tuple[Reference, ...]:
        """Policies whose velocities the loss needs, in the order of computing."""
        return ()

    def anchor_decay(self) -> Anchor | None:
        """How the policy ``anchor`` follows after each optimiser step; None without one."""
        return None

    def problems(self, steps: int) -> Iterator[tuple[str, str]]:
        """Keys of the section that do not fit `steps` trained steps, each with what would be right."""
        yield from ()


class ForwardProcessSection(ObjectiveSection):
    """Of objectives that noise clean latents again."""

    shared_noise: bool = False
    """Whether all samples of a prompt get the same noise and the same noise levels, one from each of as many nearly
    equal slices of the schedule (V-GRPO, arXiv 2604.23380): their comparison has less noise of its own.
    """


class DiffusionNftConfig(ForwardProcessSection):
    """DiffusionNFT (arXiv 2509.16117)."""

    implementation: ClassVar[str] = "nft:DiffusionNft"
    kind: Literal["diffusion_nft"] = "diffusion_nft"
    beta: AboveZero = 1.0
    """NFT mixing coefficient."""
    kl: AtLeastZero = 1e-4
    """Weight of MSE(v_theta, v_reference); 0 skips the reference forward."""
    clip_range: AboveZero | None = None
    """How far a sample can move its velocity away from v_old, as a share of the distance from v_old to its own target,
    eps - x0. null: no bound.
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
    """How the flow-matching error of a sample estimates its negative log-likelihood."""
    power: Share = 0.25
    """p of ``ghuber``."""
    timesteps: Positive = 6
    """Noise levels per sample, one from each of as many nearly equal slices of the schedule, in whole steps."""
    timestep_fraction: Share = 0.9
    """The slices cover this leading share of the full schedule's steps."""
    skip_first: bool = False
    """Whether the slices begin at the second step, not at pure noise."""
    clip_range: AboveZero = 1.0
    """Ratios are clipped to 1 ± this."""
    kl: AtLeastZero = 1e-4
    """Weight of MSE(v_theta, v_reference); 0 skips the reference forward."""
    anchor: Anchor = Anchor()
    advantage: Advantage = Advantage()
    advantage_max: AboveZero = 1.0
    """Advantages are clipped and then scaled so that the clip becomes this."""
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
    """Flow-GRPO (arXiv 2505.05470): clipped ratios of the stored transitions; all but the last, or the window's."""

    implementation: ClassVar[str] = "grpo:FlowGrpo"
    needs_trajectory: ClassVar[bool] = True
    trains_guided_velocity: ClassVar[bool] = True
    kind: Literal["flow_grpo"] = "flow_grpo"
    clip_range: AboveZero = 1e-4
    """Ratios of mean log-probabilities are clipped to 1 ± this."""
    kl: AtLeastZero = 0.0
    """Weight of the transitions' KL divergence to the reference; 0 skips the reference forward."""
    advantage: Advantage = Advantage()
    old_decay: ClassVar[OldDecay] = COPY

    def passes(self, steps: int, transitions: int) -> int:
        return transitions

    def references(self) -> tuple[Reference, ...]:
        return ("base",) if self.kl else ()


class DanceGrpoConfig(ObjectiveSection):
    """DanceGRPO (arXiv 2505.07818): as Flow-GRPO on a random share of each sample's transitions, without KL."""

    implementation: ClassVar[str] = "grpo:DanceGrpo"
    needs_trajectory: ClassVar[bool] = True
    trains_guided_velocity: ClassVar[bool] = True
    kind: Literal["dance_grpo"] = "dance_grpo"
    clip_range: AboveZero = 1e-4
    """Ratios of mean log-probabilities are clipped to 1 ± this."""
    timestep_fraction: Share = 0.6
    """Share of the stored transitions on which each sample is trained, drawn separately for each sample."""
    advantage: Advantage = Advantage(std="group_unbiased")
    kl: ClassVar[float] = 0.0
    old_decay: ClassVar[OldDecay] = COPY

    def passes(self, steps: int, transitions: int) -> int:
        return share_of(transitions, self.timestep_fraction)


ObjectiveConfig: TypeAlias = Annotated[
    DiffusionNftConfig | AwmConfig | FlowGrpoConfig | DanceGrpoConfig, Field(discriminator="kind")
]

"""The section `rollout.sampler`: the ODE or one of the published SDEs."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias, get_args

from pydantic import Field

from solrl_ray.config.section import AboveZero, Natural, Positive, Section, Share

DEFAULT = "ode"


class Window(Section):
    """A window of consecutive steps with noise; all other steps are Euler steps. Its start is drawn once per prompt and
    iteration.
    """

    size: Positive
    """Number of steps with noise."""
    range: tuple[Natural, Positive]
    """The window lies within steps low … high - 1 of the full schedule; its start is uniform."""


class Ode(Section):
    """Deterministic sampling with `rollout.solver`."""

    kind: Literal["ode"] = "ode"

    def recorded(self, steps: int) -> int:
        """Always 0: deterministic transitions have no density."""
        return 0


class _Stochastic(Section):
    ranks_with_fewer_steps: ClassVar[bool] = True
    """Whether a preview with fewer steps than the sample gives nearly the same image."""
    window: Window | None = None
    """Window of steps with noise; null: noise in every step."""
    shared_noise: bool = False
    """Start all candidates of a prompt from the same latent, so that they differ only by the noise of the steps."""

    def recorded(self, steps: int) -> int:
        """Number of trainable transitions of a full trajectory: those of the window, else all but the last, which has
        the least noise.
        """
        return steps - 1 if self.window is None else self.window.size


class FlowSde(_Stochastic):
    """Flow-SDE (Flow-GRPO, arXiv 2505.05470): s = a·sqrt(sigma / (1 - sigma))."""

    kind: Literal["flow_sde"] = "flow_sde"
    noise_level: AboveZero = 0.7
    """Noise level a. Published values: 0.7 for SD3.5, 0.9 for FLUX.1-dev."""


class DanceSde(_Stochastic):
    """The SDE of DanceGRPO (arXiv 2505.07818): s = eta. The image is decoded from the last step's estimate of x0."""

    kind: Literal["dance_sde"] = "dance_sde"
    eta: AboveZero = 0.3
    """Standard deviation of the noise, for a step of length 1."""
    shared_noise: bool = True
    """Start all candidates of a prompt from the same latent, so that they differ only by the noise of the steps."""


class Cps(_Stochastic):
    """Coefficient-preserving sampling (arXiv 2509.05952): std = sigma_next · sin(a·pi / 2)."""

    ranks_with_fewer_steps: ClassVar[bool] = False
    kind: Literal["cps"] = "cps"
    noise_level: Share = 0.8
    """Noise level a."""


Stochastic: TypeAlias = FlowSde | DanceSde | Cps
STOCHASTIC = tuple(str(each.model_fields["kind"].default) for each in get_args(Stochastic))
"""The sampler kinds that have trainable transitions."""
SamplerConfig: TypeAlias = Annotated[Ode | Stochastic, Field(discriminator="kind")]

"""The section `rollout.sampler`: how noise becomes an image, by ODE or by one of the published SDEs."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias, get_args

from pydantic import Field

from solrl_ray.config.section import AboveZero, Natural, Positive, Section, Share

DEFAULT = "ode"


class Window(Section):
    """Noise in a few consecutive steps only; the others are Euler steps. Drawn once a prompt and iteration."""

    size: Positive
    """Steps with noise."""
    range: tuple[Natural, Positive]
    """The window lies in the full schedule's steps low … high - 1; its start is uniform."""


class Ode(Section):
    """Deterministic, with `rollout.solver`."""

    kind: Literal["ode"] = "ode"

    def recorded(self, steps: int) -> int:
        """No transition has a density."""
        return 0


class _Stochastic(Section):
    ranks_with_fewer_steps: ClassVar[bool] = True
    """Whether a preview with fewer steps than the sample leads to nearly the same picture."""
    window: Window | None = None
    """null: noise in every step."""
    shared_noise: bool = False
    """Whether a prompt's candidates begin at the same latent and differ only by the noise of the steps."""

    def recorded(self, steps: int) -> int:
        """Transitions of a full trajectory that can be trained on: the window's; else all but the last; or none."""
        return steps - 1 if self.window is None else self.window.size


class FlowSde(_Stochastic):
    """Flow-SDE (Flow-GRPO, arXiv 2505.05470): s = a·sqrt(sigma / (1 - sigma))."""

    kind: Literal["flow_sde"] = "flow_sde"
    noise_level: AboveZero = 0.7
    """a. Published: 0.7 SD3.5, 0.9 FLUX.1-dev."""


class DanceSde(_Stochastic):
    """The SDE of DanceGRPO (arXiv 2505.07818): s = eta; the picture is decoded from the last step's estimate of x0."""

    kind: Literal["dance_sde"] = "dance_sde"
    eta: AboveZero = 0.3
    """Standard deviation of the noise, for a step of length 1."""
    shared_noise: bool = True
    """Whether a prompt's candidates begin at the same latent and differ only by the noise of the steps."""


class Cps(_Stochastic):
    """Coefficient-preserving sampling (arXiv 2509.05952): std = sigma_next · sin(a·pi / 2)."""

    ranks_with_fewer_steps: ClassVar[bool] = False
    kind: Literal["cps"] = "cps"
    noise_level: Share = 0.8
    """a."""


Stochastic: TypeAlias = FlowSde | DanceSde | Cps
STOCHASTIC = tuple(str(each.model_fields["kind"].default) for each in get_args(Stochastic))
"""The kinds that have transitions to train on."""
SamplerConfig: TypeAlias = Annotated[Ode | Stochastic, Field(discriminator="kind")]

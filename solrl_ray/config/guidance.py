"""The section `cfg`: classifier-free guidance of the training samples and, if it differs, of evaluations."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import Field

from solrl_ray.config.section import Section, ShareOrZero


class Cfg(Section):
    """Classifier-free guidance (arXiv 2207.12598): v = v_negative + scale (v - v_negative), from two forwards."""

    scale: Annotated[float, Field(ge=1)] = 1.0
    """Guidance scale as in the paper; 1: no guidance. The diffusers pipelines of FLUX and Qwen-Image call it
    `true_cfg_scale`. The `guidance_scale` of Z-Image's pipeline is this value minus 1.
    """
    negative_prompt: str = ""
    """Negative prompt, the text of v_negative."""
    interval: tuple[ShareOrZero, ShareOrZero] = (0.0, 1.0)
    """Lowest and highest noise level with guidance (arXiv 2404.07724). At other noise levels v is the velocity for the
    prompt only.
    """

    @property
    def is_on(self) -> bool:
        return self.scale > 1

    def describe(self) -> str:
        """``scale 4.5 against "blurry" at noise levels 0.2 to 0.8``; empty without guidance."""
        against = f" against {json.dumps(self.negative_prompt, ensure_ascii=False)}" if self.negative_prompt else ""
        low, high = self.interval
        levels = f" at noise levels {low:g} to {high:g}" if (low, high) != (0, 1) else ""
        return f"scale {self.scale:g}{against}{levels}" if self.is_on else ""

    @property
    def velocities(self) -> int:
        """Number of velocities that one solver step of a sample needs."""
        return 2 if self.is_on else 1

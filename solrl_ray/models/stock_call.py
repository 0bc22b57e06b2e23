"""How to call the stock diffusers pipeline so that it computes the same as ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from solrl_ray.config.schema import Model

ARGUMENTS: dict[str, Callable[[Model], dict[str, Any]]] = {
    "flux": lambda model: {"guidance_scale": model.guidance},
    "flux2_klein": lambda model: {"guidance_scale": 1.0},
    "qwen_image": lambda model: {"true_cfg_scale": 1.0},
    "sana": lambda model: {
        "guidance_scale": 1.0,
        "complex_human_instruction": None,
        "use_resolution_binning": False,
    },
    "sd3": lambda model: {"guidance_scale": 1.0},
    "z_image": lambda model: {"guidance_scale": 0.0},
}
"""``model.family`` → arguments that switch off classifier-free guidance and changes to the prompt."""


def stock_call(model: Model, steps: int) -> dict[str, Any]:
    """Arguments of the stock pipeline besides the prompt: size in pixels, steps, tokens, those of the family."""
    return {
        "height": model.resolution,
        "width": model.resolution,
        "num_inference_steps": steps,
        "max_sequence_length": model.max_sequence_length,
        **ARGUMENTS[model.family](model),
    }

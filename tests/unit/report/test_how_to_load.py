"""The call that a report and a model card show: what the run trained, not what diffusers would do by itself."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from solrl_ray import models
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Model
from solrl_ray.models.stock_call import ARGUMENTS, stock_call
from solrl_ray.report.rendering import rendered

CONFIGS = Path(__file__).parents[3] / "configs"
CALLS: dict[str, dict[str, Any]] = {
    "flux1_dev": {"height": 512, "width": 512, "guidance_scale": 1.0},
    "flux2_klein_base_4b": {"guidance_scale": 1.0},
    "qwen_image": {"true_cfg_scale": 1.0},
    "sana_1600m": {
        "height": 1024,
        "width": 1024,
        "guidance_scale": 1.0,
        "complex_human_instruction": None,
        "use_resolution_binning": False,
    },
    "sd35_large": {"height": 1024, "width": 1024, "guidance_scale": 1.0},
    "z_image": {"guidance_scale": 0.0},
}
"""Shipped model → some of the arguments, by its pipeline's documentation: no classifier-free guidance."""


def model_of(name: str) -> Model:
    return load((CONFIGS / "demo.yaml", CONFIGS / "models" / f"{name}.yaml"), ()).model


def given(model: Model) -> dict[str, Any]:
    """What the shown lines pass to the pipeline."""
    passed: dict[str, Any] = {}

    class Pictures:
        images = (type("Picture", (), {"save": lambda self, path: None})(),)

    def pipe(**arguments: Any) -> Pictures:
        passed.update(arguments)
        return Pictures()

    exec(rendered("call.txt", call=stock_call(model, 10)), {"pipe": pipe})
    return passed


def test_every_family_has_a_call() -> None:
    assert {model_of(name).family for name in CALLS} == ARGUMENTS.keys() == models.FAMILIES.keys()


@pytest.mark.parametrize("name", CALLS)
def test_the_shown_call_has_size_steps_and_the_familys_arguments(name: str) -> None:
    model = model_of(name)
    passed = given(model)
    assert passed.items() >= CALLS[name].items()
    assert (passed["prompt"], passed["num_inference_steps"]) == ("a prompt", 10)
    assert (passed["height"], passed["width"]) == (model.resolution, model.resolution)
    assert passed["max_sequence_length"] == model.max_sequence_length
    assert passed.keys() <= inspect.signature(models.family(model).PIPELINE.__call__).parameters.keys()


def test_flux_is_given_the_value_of_its_guidance_embedding() -> None:
    model = model_of("flux1_dev")
    assert given(model.model_copy(update={"guidance": 2.5}))["guidance_scale"] == 2.5

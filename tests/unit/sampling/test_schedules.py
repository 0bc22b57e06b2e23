"""Sigma grids against published values, and against diffusers' own schedulers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from solrl_ray.config import named
from solrl_ray.config.loading import read_file
from solrl_ray.config.schema import SigmaSchedule
from solrl_ray.sampling.schedules import sigmas

FLUX = SigmaSchedule(kind="flux")
SD3 = SigmaSchedule(kind="shift", shift=3.0)
QWEN = SigmaSchedule(kind="flux", max_shift=0.9, max_tokens=8192, terminal=0.02)
LINEAR = SigmaSchedule(kind="linear")


@pytest.mark.parametrize(
    ("schedule", "grid"),
    [
        (SD3, "1 .9601293 .9133489 .8576923 .7903683 .7072785 .6021505 .4648760 .2780488 .0089286 0"),
        (SD3, "1 .9233425 .8189233 .6683267 .4322251 .0089286 0"),
        (FLUX, "1 .9441294 .8824973 .8141641 .7379740 .6524895 .5558991 .4458883 .3194513 .1726124 0"),
        (FLUX, "1 .9037356 .7897048 .6524895 .4842184 .2730033 0"),
        (LINEAR, "1 .75 .5 .25 0"),
    ],
)
def test_grids_have_the_published_values(schedule: SigmaSchedule, grid: str) -> None:
    expected = [float(value) for value in grid.split()]
    found = sigmas(schedule, len(expected) - 1, image_tokens=1024)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), expected, atol=5.1e-8, rtol=0)


@pytest.mark.parametrize("steps", [1, 2, 6, 10, 28])
@pytest.mark.parametrize("image_tokens", [64, 1024, 4096])
def test_flux_grid_is_that_of_the_stock_pipeline(steps: int, image_tokens: int) -> None:
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15)
    mu = calculate_shift(image_tokens, 256, 4096, 0.5, 1.15)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps).tolist(), mu=mu)
    found = sigmas(FLUX, steps, image_tokens)
    np.testing.assert_allclose(found.numpy(), scheduler.sigmas.numpy(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("steps", [2, 6, 10, 50])
@pytest.mark.parametrize("image_tokens", [64, 1024, 4096])
def test_a_grid_with_a_terminal_noise_level_is_that_of_qwen_images_scheduler(steps: int, image_tokens: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02)
    mu = 0.5 + (image_tokens - 256) * (0.9 - 0.5) / (8192 - 256)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps).tolist(), mu=mu)
    found = sigmas(QWEN, steps, image_tokens)
    np.testing.assert_allclose(found.numpy(), scheduler.sigmas.numpy(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("steps", [1, 2, 6, 10, 40])
def test_shift_grid_is_that_of_the_stock_scheduler(steps: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    np.testing.assert_allclose(sigmas(SD3, steps, 1024).numpy(), scheduler.sigmas.numpy(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("steps", [1, 2, 8, 20, 50])
@pytest.mark.parametrize("shift", [3.0, 5.0, 8.0])  # of Wan 2.1 at 480p, of Wan 2.2 and 720p, of SANA-Video
def test_a_grid_that_is_shifted_once_is_that_of_the_video_models_own_schedulers(shift: float, steps: int) -> None:
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
    found = sigmas(SigmaSchedule(kind="flow_shift", shift=shift), steps, 1024).numpy()
    for scheduler, limit in ((UniPCMultistepScheduler(**flow), 1.1e-6), (DPMSolverMultistepScheduler(**flow), 0.007)):
        scheduler.set_timesteps(steps)
        np.testing.assert_allclose(found, scheduler.sigmas.numpy(), atol=limit, rtol=0)


@pytest.mark.parametrize("name", ["wan21_1_3b", "wan21_14b", "wan22_5b", "sana_video_2b"])
def test_presets_of_videos_have_the_published_grid(name: str) -> None:
    (file,) = named.resolve([Path(name)])
    schedule = SigmaSchedule.model_validate(read_file(file)["model"]["schedule"])
    published = 8.0 if name.startswith("sana") else 5.0 if name.startswith("wan22") else 3.0
    # By hand, for 4 steps: the levels 1, .75025, .5005 and .25075, shifted once.
    by_hand = [published * level / (1 + (published - 1) * level) for level in (1.0, 0.75025, 0.5005, 0.25075)]
    np.testing.assert_allclose(sigmas(schedule, 4, 1024).numpy(), [*by_hand, 0.0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("schedule", [LINEAR, SD3, FLUX, QWEN, SigmaSchedule(kind="flow_shift", shift=5.0)])
@pytest.mark.parametrize("steps", [1, 2, 7, 50])
def test_every_grid_falls_from_one_to_exactly_zero(schedule: SigmaSchedule, steps: int) -> None:
    grid = sigmas(schedule, steps, image_tokens=64)
    assert grid.shape == (steps + 1,)
    assert grid[0] == 1.0
    assert grid[-1] == 0.0
    assert (grid[1:] < grid[:-1]).all()

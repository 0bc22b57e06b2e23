"""The call that a report and a model card show: what the run trained, not what diffusers would do by itself."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from torch import Tensor

from actors.workers.regenerator import evaluating
from solrl_ray import models
from solrl_ray.config.guidance import Cfg
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.models.qwen_image_edit import QwenImageEdit
from solrl_ray.models.stock_call import StockCall
from solrl_ray.prompts.encoding import encode_prompts
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.prompts.references import prepared
from solrl_ray.records import Address, Prompt, PromptEmbedding, WorkUnit
from solrl_ray.report.rendering import rendered
from solrl_ray.sampling.noise import initial_noise
from tests.support import families
from tests.support.brightness import Brightness
from tests.support.editing import picture, write_prompts
from tests.support.made_configs import changed

CONFIGS = Path(__file__).parents[3] / "configs"
SHIPPED = {
    "chroma": "chroma1_hd",
    "flux": "flux1_dev",
    "flux2_klein": "flux2_klein_base_4b",
    "flux_kontext": "flux1_kontext_dev",
    "qwen_image": "qwen_image",
    "qwen_image_edit": "qwen_image_edit",
    "sana": "sana_1600m",
    "sana_video": "sana_video_2b",
    "sd3": "sd35_large",
    "wan": "wan21_1_3b",
    "wan21_i2v": "wan21_14b_i2v",
    "wan_i2v": "wan22_5b_i2v",
    "z_image": "z_image",
}


@pytest.fixture(autouse=True)
def no_video_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shown lines write one."""
    monkeypatch.setattr("diffusers.utils.export_to_video", lambda *_, **__: None)


def config_of(name: str) -> Config:
    return load((CONFIGS / "demo.yaml", CONFIGS / "models" / f"{name}.yaml"), ("evaluation.steps=12",))


class Pipe:
    """A pipeline that begins at given noise, and whose picture stays where it is."""

    pipeline: Callable[..., Any]
    given: dict[str, Any]
    drawn: Any

    def __init__(self, pipeline: Callable[..., Any], **given: Any) -> None:
        self.__dict__.update(pipeline=pipeline, given=given, drawn=None)  # not by `__setattr__`

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.pipeline, name, value)

    def __call__(self, **arguments: Any) -> Any:
        made = self.pipeline(**arguments, **self.given)
        self.__dict__["drawn"] = made.images if "images" in made else made.frames.transpose(1, 2)
        return SimpleNamespace(images=[SimpleNamespace(save=lambda path: None)], frames=[[]])


def given(config: Config) -> dict[str, Any]:
    """What the shown lines pass to the pipeline."""
    passed: dict[str, Any] = {}

    class Pictures:
        images = (type("Picture", (), {"save": lambda self, path: None})(),)

    def pipe(**arguments: Any) -> Pictures:
        passed.update(arguments)
        return Pictures()

    exec(rendered("call.txt", drawing=StockCall.of(config)), {"pipe": pipe})
    return passed


def test_every_family_has_a_call() -> None:
    assert SHIPPED.keys() == models.FAMILIES.keys()


def test_flux_is_given_the_value_of_its_guidance_embedding() -> None:
    config = changed(config_of("flux1_dev"), model={"guidance": 2.5})
    assert given(config)["guidance_scale"] == 2.5
    assert given(changed(config, evaluation={"guidance": 3.5}))["guidance_scale"] == 3.5


def test_the_shown_lines_cut_a_picture_as_the_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture(0, 20, 50).save(tmp_path / "reference-0.png")
    monkeypatch.chdir(tmp_path)
    config = changed(config_of("flux1_kontext_dev"), model={"resolution": (32, 48)})
    passed = given(config)["image"]
    expected = prepared((tmp_path / "reference-0.png").read_bytes(), "reference-0.png", 32, 48)
    assert np.array_equal(np.asarray(passed), expected.transpose(1, 2, 0))


def drawn_by_run(config: Config, prompt: Prompt) -> Tensor:
    """The pictures of two evaluated addresses, float32 [2, 3, H, W], by the sampler of the run's regenerators."""
    model = models.load(config.model, "cpu")
    own, negative = (
        PromptEmbedding(
            prompt_id=prompt.id, tensors=encode_prompts(model, [replace(prompt, text=text)])[0], digest=text
        )
        for text in (prompt.text, config.evaluated_model.cfg.negative_prompt)
    )
    embedding = own.against(negative)
    unit = WorkUnit(stage="evaluate", iteration=3, revision=0, prompt_id=prompt.id, indices=(0, 1))
    return evaluating(config, model, Brightness("brightness")).evaluate(unit, [prompt], [embedding]).images


GUIDANCE: dict[str, dict[str, Any]] = {name: {"scale": 3.5, "negative_prompt": "blue circles"} for name in SHIPPED}
GUIDANCE["flux2_klein"]["negative_prompt"] = ""  # its pipeline takes no other
GUIDANCE["z_image"]["interval"] = (0.7, 1.0)  # its pipeline's truncation


@pytest.mark.parametrize(("solver", "guided"), [("euler", False), ("dpm2", True)])
@pytest.mark.parametrize("family", SHIPPED)
def test_the_shown_lines_draw_the_runs_own_picture(
    family: str, solver: str, guided: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = families.BUILDERS[family](tmp_path / "pipeline")
    shipped = load(
        (CONFIGS / "demo.yaml", CONFIGS / "models" / f"{SHIPPED[family]}.yaml"),
        ("evaluation.steps=5", "evaluation.samples=2"),
    )
    side = families.resolution(family)
    resolution = (2 * side, side) if guided else side
    model = families.model_config(family, checkpoint, schedule=shipped.model.schedule, resolution=resolution)
    cfg = Cfg(**GUIDANCE[family]) if guided else None
    config = changed(shipped, rollout={"solver": solver})
    config = config.model_copy(update={"model": model, "evaluation": config.evaluation.model_copy(update={"cfg": cfg})})
    (shape,) = model.shapes
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", shape.pixels)  # a megapixel takes minutes
    file = write_prompts(tmp_path / "reference.jsonl", ["a prompt"], shape.height, shape.width)
    seen = read_prompts(str(file))[0].references if model.references else ()
    if seen:
        shutil.copy(seen[0].path, tmp_path / "reference-0.png")
    monkeypatch.chdir(tmp_path)
    prompt = Prompt(id="p", text="a prompt", references=seen)
    addresses = [
        Address(run_seed=config.run.seed, purpose="evaluation-noise", iteration=0, prompt_id="p", index=i)
        for i in (0, 1)
    ]
    bare = models.load(model, "cpu", components=())
    noise = initial_noise(addresses, bare.latent_shape)
    pipeline = getattr(diffusers, StockCall.of(config).pipeline).from_pretrained(checkpoint)
    pipeline.set_progress_bar_config(disable=True)
    before = pipeline.scheduler
    drawn = []
    for row in noise.split(1):
        pipe = Pipe(pipeline, latents=bare.stock_latents(row), output_type="pt")
        exec(rendered("call.txt", drawing=StockCall.of(config)), {"pipe": pipe})
        drawn.append(pipe.drawn)
    assert pipeline.scheduler is not before
    torch.testing.assert_close(torch.cat(drawn), drawn_by_run(config, prompt), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "interval", "told"),
    [("sd35_large", (0.2, 0.8), "0.2 to 0.8"), ("z_image", (0.2, 0.8), "0.2 to 0.8"), ("z_image", (0.2, 1.0), "")],
)
def test_the_lines_say_what_the_stock_pipeline_cannot(name: str, interval: tuple[float, float], told: str) -> None:
    config = config_of(name)
    model = config.model.model_copy(update={"cfg": Cfg(scale=4.0, negative_prompt='a "b" {c}', interval=interval)})
    guided = config.model_copy(update={"model": model})
    assert StockCall.of(config).differs == ""
    assert told in StockCall.of(guided).differs
    assert bool(told) == bool(StockCall.of(guided).differs)
    assert given(guided)["negative_prompt"] == 'a "b" {c}'


@pytest.mark.parametrize(
    ("name", "resolution", "told"),
    [
        ("flux1_kontext_dev", 512, False),
        ("qwen_image_edit", 512, True),
        ("qwen_image_edit", (512, 1024), True),
        ("qwen_image_edit", 1024, False),
        ("qwen_image_edit", (832, 1248), False),
        ("flux2_klein_base_4b", 512, False),
        ("flux2_klein_base_4b", 1536, True),
    ],
)
def test_the_lines_say_where_the_stock_pipeline_sees_references_in_another_size(
    name: str, resolution: int | tuple[int, int], told: bool
) -> None:
    config = changed(config_of(name), model={"resolution": resolution, "references": 1})
    said = "1024 x 1024 px" in StockCall.of(config).differs
    assert said is told
    if config.model.family == "qwen_image_edit":  # by its own code
        stock, shape = pipeline_qwenimage_edit_plus, config.model.shapes[0]
        brought = stock.calculate_dimensions(stock.VAE_IMAGE_SIZE, shape.width / shape.height)
        assert (brought != (shape.width, shape.height)) is told
        with QwenImageEdit.stock_keeps_references(shape):
            brought = stock.calculate_dimensions(stock.VAE_IMAGE_SIZE, shape.width / shape.height)
        assert brought == (shape.width, shape.height)
        assert stock.VAE_IMAGE_SIZE == 1024**2


def test_the_lines_draw_the_first_of_several_shapes_and_name_all() -> None:
    model = config_of("sd35_large").model.model_copy(update={"resolution": [(768, 1344), (1024, 1024)]})
    drawing = StockCall(model=model, steps=4, solver="euler")
    assert (drawing.call["height"], drawing.call["width"]) == (768, 1344)
    assert "768 x 1344 or 1024 x 1024 px" in rendered("call.txt", drawing=drawing)


def test_a_schedule_of_ones_own_is_in_the_lines() -> None:
    config = changed(config_of("sd35_large"), model={"schedule": {"kind": "shift", "shift": 4.5}})
    text = rendered("call.txt", drawing=StockCall.of(config))
    assert re.search(r"^pipe\.scheduler = Solver\(shift=4\.5\)$", text, re.MULTILINE)


def test_the_guide_shows_the_lines_of_a_run_of_flux() -> None:
    config = load((CONFIGS / "runs/flux1_dev_80gb.yaml",))
    guide = (CONFIGS.parent / "docs/guides/sharing.md").read_text()
    shown, *_ = re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    lines = rendered("call.txt", drawing=StockCall.of(config))
    assert ast.unparse(ast.parse(lines)) in ast.unparse(ast.parse(shown))  # the formatter lays the guide's out

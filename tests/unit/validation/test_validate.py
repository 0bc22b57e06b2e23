"""`solrl validate` passes sound models of every family, and finds what differs from the stock pipeline."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DPMSolverMultistepScheduler, FluxTransformer2DModel
from PIL import Image

from solrl_ray.cli.validate import steps
from solrl_ray.config import yaml_text
from solrl_ray.config.guidance import Cfg
from solrl_ray.config.schema import SigmaSchedule
from solrl_ray.report.grids import GAP
from solrl_ray.validation import against_stock
from solrl_ray.validation.against_stock import Measure, Session
from tests.support import families, tiny
from tests.support.command_line import refusal, solrl
from tests.support.made_configs import changed

CPU = torch.device("cpu")
CONFIGS = Path(__file__).parents[3] / "configs"
STEPS = ["text", "stock_picture", "load", "forward", "picture"]
TARGETS = {
    "chroma": ["to_q", "to_k"],
    "flux": ["to_q", "to_k"],
    "sana_video": ["to_q", "to_k", "conv_inverted", "conv_point"],
    "sd3": ["attn.to_q", "attn.to_k", "attn.add_q_proj"],
    "sana": ["to_q", "to_k", "conv_inverted", "conv_point"],
    "flux2_klein": ["to_q", "to_k", "to_qkv_mlp_proj"],
    "flux_kontext": ["to_q", "to_k"],
    "qwen_image_edit": ["to_q", "add_q_proj", "img_mlp.net.0.proj"],
    "qwen_image": ["to_q", "add_q_proj", "img_mlp.net.0.proj"],
    "wan": ["to_q", "to_k", "ffn.net.2"],
    "wan21_i2v": ["to_q", "to_k", "add_k_proj", "ffn.net.2"],
    "wan_i2v": ["to_q", "to_k", "ffn.net.2"],
    "z_image": ["to_q", "to_k", "feed_forward.w1"],
}
"""Family → LoRA targets."""


def model_file(folder: Path, family: str, checkpoint: Path, **changes: Any) -> Path:
    """A configuration with a model and nothing else."""
    lora = tiny.Lora(rank=4, alpha=8.0, targets=TARGETS[family])
    model = families.model_config(family, checkpoint, **{"lora": lora} | changes)
    learner = {"micro_batch": 2, "activation_memory": 1}
    file = folder / f"{family}.yaml"
    file.write_text(yaml_text.dump({"model": model.model_dump(mode="json"), "learner": learner}))
    return file


def report_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "validation.json").read_text())
    return content


def session(folder: Path, checkpoint: Path, **changes: Any) -> Session:
    from solrl_ray.cli.options import parser
    from solrl_ray.cli.validate import configuration

    file = model_file(folder, changes.pop("family", "flux"), checkpoint, **changes)
    config = configuration(parser().parse_args(["validate", str(file)])).config
    return Session(config, CPU, 2)


def found(measures: list[Measure]) -> dict[str, Measure]:
    return {measure.name: measure for measure in measures}


def failing(measures: list[Measure]) -> set[str]:
    return {measure.name for measure in measures if not measure.holds}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "flux" else pytest.mark.slow) for name in TARGETS]
)
def test_a_sound_model_of_every_family_passes(
    family: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = families.BUILDERS[family](tmp_path / "checkpoint")
    file = model_file(tmp_path, family, checkpoint, dtype=dtype)
    status = solrl("validate", file, "--steps", "2", "--out", tmp_path / "out")
    printed = capsys.readouterr().out
    report = report_of(tmp_path / "out")
    assert status == 0, printed
    assert [step["step"] for step in report["steps"]] == STEPS
    assert report["ok"]
    assert all(re.search(rf"^{name} +ok ", printed, re.MULTILINE) for name in STEPS)
    assert printed.splitlines()[-1].startswith("report: ")
    assert next(step["measures"][0]["value"] for step in report["steps"] if step["step"] == "load") > 0
    assert torch.__version__.startswith(report["versions"]["torch"])
    rows = report["rows of pictures.png"]
    assert len(rows) == 2  # stock, ours
    with Image.open(tmp_path / "out" / "pictures.png") as sheet:
        gap, side = GAP, (sheet.height - GAP) // len(rows) - GAP
        shown = 5 if family in ("sana_video", "wan", "wan21_i2v", "wan_i2v") else 1  # frames of a strip
        assert sheet.size == (gap + shown * side + gap, gap + 2 * (side + gap))


def test_every_family_is_tried() -> None:
    from solrl_ray.models import FAMILIES

    assert FAMILIES.keys() == TARGETS.keys() == families.BUILDERS.keys()


def altered(checkpoint: Path, folder: Path, part: str, change: Callable[[Any], None]) -> Path:
    """A copy of the checkpoint with one part changed."""
    shutil.copytree(checkpoint, folder)
    part_class: Any = {"transformer": FluxTransformer2DModel, "vae": AutoencoderKL}[part]
    module = part_class.from_pretrained(checkpoint / part)
    with torch.no_grad():
        change(module)
    module.save_pretrained(folder / part)
    return folder


def compared(one: Session, ours: Path | None = None) -> dict[str, set[str]]:
    """What does not hold of each comparison with the stock pipeline; `ours`: another checkpoint than the stock one."""
    against_stock.text(one)
    against_stock.stock_picture(one)
    if ours is not None:
        one.config = one.config.changed({"model.path": str(ours)})
    against_stock.load(one)
    return {"forward": failing(against_stock.forward(one)), "picture": failing(against_stock.picture(one))}


def test_an_altered_weight_of_the_transformer_fails_velocity_and_picture(tmp_path: Path, tiny_pipeline: Path) -> None:
    assert compared(session(tmp_path, tiny_pipeline)) == {"forward": set(), "picture": set()}
    other = altered(tiny_pipeline, tmp_path / "other", "transformer", lambda net: net.proj_out.weight[0].mul_(3))
    found = compared(session(tmp_path, tiny_pipeline), other)
    assert found["forward"] == {"relative error of the first velocity", "largest relative error of all steps"}
    assert found["picture"] == {"PSNR of the image, dB"}


def test_an_altered_weight_of_the_decoder_fails_the_picture_alone(tmp_path: Path, tiny_pipeline: Path) -> None:
    other = altered(tiny_pipeline, tmp_path / "other", "vae", lambda vae: vae.decoder.conv_out.bias.add_(0.5))
    found = compared(session(tmp_path, tiny_pipeline), other)
    assert found["forward"] == set()
    assert found["picture"] == {"PSNR of the image, dB", "PSNR of our decoder on the stock latents, dB"}


def test_a_wrong_guidance_fails_the_comparison(tmp_path: Path) -> None:
    """As a wrong argument of the stock call or of our forward would."""
    guided = tiny.build_pipeline(tmp_path / "guided", guidance_embeds=True)
    one = session(tmp_path, guided)
    assert compared(one) == {"forward": set(), "picture": set()}
    one.config = changed(one.config, model={"guidance": 7.0})
    against_stock.load(one)
    assert failing(against_stock.forward(one))


def test_guidance_is_compared_with_the_stock_pipelines(tmp_path: Path, tiny_pipeline: Path) -> None:
    """At all noise levels, because the stock pipeline has no interval."""
    cfg = Cfg(scale=3.0, negative_prompt="dull", interval=(0.9, 1.0))
    one = session(tmp_path, tiny_pipeline, cfg=cfg)
    assert compared(one) == {"forward": set(), "picture": set()}
    one.config = one.config.model_copy(update={"model": one.config.model.model_copy(update={"cfg": Cfg(scale=2.0)})})
    against_stock.load(one)
    assert failing(against_stock.forward(one))


def test_the_stock_pipeline_draws_on_the_runs_own_noise_levels(tmp_path: Path, tiny_pipeline: Path) -> None:
    one = session(tmp_path, tiny_pipeline, schedule=SigmaSchedule(kind="shift", shift=5.0))
    assert compared(one) == {"forward": set(), "picture": set()}
    assert one.stock
    halves = [1.0, 5 * 0.5 / (1 + 4 * 0.5), 0.0]  # sigma -> 5 sigma / (1 + 4 sigma)
    assert one.stock.sigmas == pytest.approx(halves, abs=1e-3)


def test_a_stock_scheduler_of_several_steps_gives_way_to_eulers(tmp_path: Path) -> None:
    """As of SANA, whose pipeline comes with DPM-Solver++."""
    checkpoint = tiny.build_sana(tmp_path / "sana")
    DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, final_sigmas_type="zero"
    ).save_pretrained(checkpoint / "scheduler")
    index = checkpoint / "model_index.json"
    index.write_text(index.read_text().replace("FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler"))
    one = session(tmp_path, checkpoint, family="sana")
    assert compared(one) == {"forward": set(), "picture": set()}
    drawn = found(against_stock.stock_picture(one))
    assert str(drawn["the checkpoint's own scheduler"].value).startswith("DPMSolverMultistepScheduler")


def test_a_wrong_shift_of_the_noise_levels_fails(
    tmp_path: Path, tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = session(tmp_path, tiny_pipeline, schedule=SigmaSchedule(kind="linear"))
    assert not failing(against_stock.stock_picture(one))
    right = against_stock.sigmas

    def shifted(*given: Any) -> torch.Tensor:
        return 1.2 * right(*given) / (1 + 0.2 * right(*given))

    monkeypatch.setattr(against_stock, "sigmas", shifted)
    drawn = found(against_stock.stock_picture(one))
    wrong = drawn["largest difference of a noise level from model.schedule"]
    assert wrong.value == pytest.approx(0.6 / 1.1 - 0.5, abs=1e-6)  # of the levels 1, 1/2 and 0
    assert failing(list(drawn.values())) == {wrong.name}


def test_another_text_fails_velocity_and_picture(tmp_path: Path, tiny_pipeline: Path) -> None:
    one = session(tmp_path, tiny_pipeline)
    against_stock.text(one)
    against_stock.stock_picture(one)
    against_stock.load(one)
    first, second = (prompt.id for prompt in against_stock.PROMPTS)
    one.embeddings[first] = one.embeddings[second]
    assert failing(against_stock.forward(one))
    assert failing(against_stock.picture(one)) == {"PSNR of the image, dB"}


def test_the_first_step_that_raises_is_the_last_and_is_reported(
    tmp_path: Path, tiny_pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = shutil.copytree(tiny_pipeline, tmp_path / "broken")
    (broken / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"none")
    file = model_file(tmp_path, "flux", broken)
    assert solrl("validate", file, "--steps", "2", "--out", tmp_path / "out") == 1
    report = report_of(tmp_path / "out")
    assert not report["ok"]
    assert [(step["step"], step["ok"]) for step in report["steps"]] == [("text", True), ("stock_picture", False)]
    failed = report["steps"][-1]
    assert failed["reason"]
    assert "in stock_picture" in failed["traceback"]
    assert re.search(r"^stock_picture +FAILS ", capsys.readouterr().out, re.MULTILINE)


def test_a_step_whose_limit_does_not_hold_is_followed_by_the_next(
    tmp_path: Path, tiny_pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nan = altered(tiny_pipeline, tmp_path / "nan", "transformer", lambda net: net.x_embedder.weight.fill_(torch.nan))
    file = model_file(tmp_path, "flux", nan)
    assert solrl("validate", file, "--steps", "2", "--out", tmp_path / "out") == 1
    report = report_of(tmp_path / "out")
    states = {step["step"]: step["ok"] for step in report["steps"]}
    assert states == {"text": True, "stock_picture": False, "load": True, "forward": False, "picture": False}
    assert "relative error of the first velocity is nan, not at most" in capsys.readouterr().out


def test_a_step_has_a_deadline(tmp_path: Path, tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against_stock, "text", lambda _: time.sleep(1))
    (late,) = steps(session(tmp_path, tiny_pipeline), 0.05)
    assert not late.ok
    assert "text passed its deadline of 0.05 s" in late.reason


SCHNELL = ("--set", "model.path=black-forest-labs/FLUX.1-schnell")


def test_what_cannot_be_validated_is_refused_at_once(
    tmp_path: Path, tiny_pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", tmp_path / "out")
    file = model_file(tmp_path, "flux", tiny_pipeline)
    for arguments, said in (
        ((tiny_pipeline,), f"model.path={tiny_pipeline}"),
        ((file, "--steps", "0"), "--steps is 0"),
        (("flux1_de",), "flux1_de,"),
        ((file, "--set", "model.resolution=17"), "model.resolution (--set) is 17"),
        ((file, "--set", "model.resolution=[16, 18]"), "model.resolution (--set) is [16, 18]"),
        ((file, "--resolution", "512"), "--set model.resolution=512"),
        ((file, "--set", "model.path=./none"), "./none"),
        ((file, *SCHNELL, "--set", "model.cfg.scale=4"), "model.cfg.scale is 4 (--set)"),
        ((file, "--set", f"model.cfg={{scale: 4, negative_prompt: {'dull ' * 40}}}"), "model.cfg.negative_prompt"),
    ):
        assert said in refusal(capsys, "validate", *arguments, *out)
    (tmp_path / "file").touch()
    assert "--out is" in refusal(capsys, "validate", file, "--out", tmp_path / "file")


def test_the_report_has_the_name_of_the_model_that_was_typed(
    tmp_path: Path, tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A method's name is merged before a model's file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation" / "flux").touch()
    file = model_file(tmp_path, "flux", tiny_pipeline)
    problem = "--out is validation/flux, a file; it must be a folder."
    assert refusal(capsys, "validate", file.name, "diffusion_nft") == problem


def test_the_resolution_is_small_unless_another_is_asked_for(tmp_path: Path, tiny_pipeline: Path) -> None:
    from solrl_ray.cli.options import parser
    from solrl_ray.cli.validate import configuration

    file = model_file(tmp_path, "flux", tiny_pipeline, resolution=1024)

    def resolution(*given: str) -> int | tuple[int, int]:
        return configuration(parser().parse_args(["validate", str(file), *given])).config.model.resolution

    assert resolution() == 256
    assert resolution("--set", "model.resolution=128") == 128
    assert resolution("--set", "model.resolution=[64, 128]") == (64, 128)
    file = model_file(tmp_path, "flux", tiny_pipeline, resolution=[[768, 1024], [1024, 1024]])
    assert resolution() == (192, 256)

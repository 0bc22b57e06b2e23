"""`solrl validate` passes sound models of every family, and fails those that are not, step by step."""

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

from solrl_ray.config import yaml_text
from solrl_ray.config.guidance import Cfg
from solrl_ray.config.schema import SigmaSchedule
from solrl_ray.errors import RunError
from solrl_ray.quantization import nvfp4
from solrl_ray.report.grids import GAP
from solrl_ray.validation import against_stock, climb, roles
from solrl_ray.validation.session import Session
from solrl_ray.validation.steps import Lacks, Measure, Outcome, Step, at_most, run, without_home
from tests.support import families, tiny
from tests.support.command_line import refusal, solrl
from tests.support.made_configs import changed

CPU = torch.device("cpu")
CONFIGS = Path(__file__).parents[3] / "configs"
STEPS = ["text", "stock", "load", "forward", "picture", "regenerate", "preview nvfp4", "preview fp8"]
STEPS += ["preview nvfp4-emulated", "update", "revision", "climb"]
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
    states = {step["step"]: step["state"] for step in report["steps"]}
    assert status == 0, printed
    assert list(states) == STEPS
    assert {name for name, state in states.items() if state == "lacks"} == {"preview nvfp4", "preview fp8"}
    assert report["ok"]
    assert all(re.search(rf"^{name} +(ok|lacks) ", printed, re.MULTILINE) for name in STEPS)
    assert printed.splitlines()[-1].startswith("report: ")
    assert "nvfp4 needs a card of compute capability 10.0 or newer" in printed
    assert next(step["measures"][0]["value"] for step in report["steps"] if step["step"] == "load") > 0
    assert torch.__version__.startswith(report["machine"]["versions"]["torch"])
    assert str(Path.home()) not in (tmp_path / "out" / "validation.json").read_text()
    rows = report["rows of pictures.png"]
    assert len(rows) == 5  # stock, ours, samples, previews in full precision and emulated
    with Image.open(tmp_path / "out" / "pictures.png") as sheet:
        gap, side = GAP, (sheet.height - GAP) // len(rows) - GAP
        shown = 5 if family in ("sana_video", "wan", "wan21_i2v", "wan_i2v") else 1  # frames of a strip
        assert sheet.size == (gap + 2 * (shown * side + gap), gap + 5 * (side + gap))


@pytest.mark.slow
def test_a_policy_that_follows_its_reward_climbs_and_one_that_flees_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the testbed's trained model."""
    from solrl_ray.cli.options import parser
    from solrl_ray.cli.validate import configuration
    from solrl_ray.learning import open_update

    config = configuration(parser().parse_args(["validate", str(CONFIGS / "models" / "testbed.yaml")])).config
    one = Session(config, CPU, 2)
    against_stock.text(one)
    assert not failing(climb.climb(one))
    right = open_update.advantages
    monkeypatch.setattr(open_update, "advantages", lambda *given, **named: -right(*given, **named))
    assert failing(climb.climb(one)) == {"change in standard errors"}


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
    assert found["picture"] == {"PSNR of the picture, dB"}


def test_an_altered_weight_of_the_decoder_fails_the_picture_alone(tmp_path: Path, tiny_pipeline: Path) -> None:
    other = altered(tiny_pipeline, tmp_path / "other", "vae", lambda vae: vae.decoder.conv_out.bias.add_(0.5))
    found = compared(session(tmp_path, tiny_pipeline), other)
    assert found["forward"] == set()
    assert found["picture"] == {"PSNR of the picture, dB", "PSNR of our decoder on the stock latents, dB"}


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


def test_a_broken_checkpoint_is_reported_and_the_rest_goes_on(
    tmp_path: Path, tiny_pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = altered(tiny_pipeline, tmp_path / "nan", "transformer", lambda net: net.x_embedder.weight.fill_(torch.nan))
    file = model_file(tmp_path, "flux", broken)
    assert solrl("validate", file, "--steps", "2", "--out", tmp_path / "out") == 1
    report = report_of(tmp_path / "out")
    states = {step["step"]: step["state"] for step in report["steps"]}
    assert not report["ok"]
    assert (states["text"], states["load"], states["regenerate"], states["update"]) == ("ok", "ok", "FAILS", "skipped")
    assert states["stock"] == "FAILS"  # whose picture is NaN, too: there is nothing to compare with
    assert states["forward"] == states["picture"] == "skipped"
    (failed,) = (step for step in report["steps"] if step["step"] == "regenerate")
    assert failed["reason"].startswith("RewardNonsense: Reward brightness got images with values from nan")
    assert "in regenerate" in failed["traceback"]
    *_, missed, last = capsys.readouterr().out.splitlines()
    assert missed.startswith("did not succeed: stock, ")
    assert str(tmp_path / "out" / "validation.json") in last


def test_a_quantiser_that_is_not_the_published_one_fails_its_tier(
    tmp_path: Path, tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = session(tmp_path, tiny_pipeline)
    against_stock.text(one)
    against_stock.load(one)
    roles.regenerate(one)
    assert not failing(roles.preview(one, "nvfp4-emulated"))
    with pytest.raises(Lacks, match=r"compute capability 10\.0"):
        roles.preview(one, "nvfp4")
    monkeypatch.setattr(nvfp4, "SIXTH", 0.16)
    with pytest.raises(RunError, match="known answer"):
        roles.preview(one, "nvfp4-emulated")


def test_samples_that_differ_the_second_time_fail(
    tmp_path: Path, tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = session(tmp_path, tiny_pipeline)
    against_stock.text(one)
    against_stock.load(one)
    assert one.model
    velocity, calls = one.model._velocity, iter(range(10_000))

    def drifting(*args: Any) -> torch.Tensor:
        return velocity(*args) * (1 + 1e-6 * next(calls))

    monkeypatch.setattr(one.model, "_velocity", drifting)
    assert failing(roles.regenerate(one)) == {"equal bytes the second time"}


def test_a_revision_that_changes_nothing_fails(tmp_path: Path, tiny_pipeline: Path) -> None:
    one = session(tmp_path, tiny_pipeline)
    against_stock.text(one)
    for name, linear in one.load("transformer").transformer.named_modules():
        if isinstance(linear, torch.nn.Linear) and name.endswith(("to_q", "to_k")):
            one.factors[f"{name}.lora_A"] = torch.ones(4, linear.in_features)
            one.factors[f"{name}.lora_B"] = torch.zeros(linear.out_features, 4)
    assert failing(roles.revision(one)) == {"relative change of the velocity"}


def outcomes(*steps: Step, seconds: float = 60.0) -> list[Outcome]:
    return list(run(steps, CPU, seconds))


def test_a_step_that_fails_stops_only_those_that_need_it() -> None:
    def fails() -> list[Measure]:
        raise ValueError("two\nlines")

    steps = [
        Step("broken", "", fails),
        Step("after", "", lambda: [Measure("it", 1)], ("broken",)),
        Step("other", "", lambda: [at_most("error", 0.1, 1, "")]),
        Step("off", "", lambda: [at_most("error", float("nan"), 1, "")]),
    ]
    broken, after, other, off = outcomes(*steps)
    assert (broken.state, broken.reason) == ("FAILS", "ValueError: two lines")
    assert "in fails" in broken.traceback
    assert (after.state, after.reason) == ("skipped", "needs broken, which did not succeed")
    assert other.state == "ok"
    assert (off.state, off.reason) == ("FAILS", "error is nan, not at most 1")


def test_a_step_has_a_deadline() -> None:
    def too_long() -> list[Measure]:
        time.sleep(1)
        return []

    late, after = outcomes(Step("late", "", too_long), Step("after", "", list), seconds=0.05)
    assert late.state == "FAILS"
    assert "late passed its deadline of 0.05 s" in late.reason
    assert after.state == "ok"


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
        ((file, "--resolution", "17"), "model.resolution (--resolution) is 17"),
        ((file, "--resolution", "16x18"), "model.resolution (--resolution) is [16, 18]"),
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


def test_home_folders_go_and_other_peoples_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, home = tmp_path / "disk" / "al", tmp_path / "al"
    real.mkdir(parents=True)
    home.symlink_to(real)
    monkeypatch.setenv("HOME", str(home))
    for place in (home, real):
        assert (
            without_home(f"{place}/x, '{place}', --set=model.path={place}/y {place}")
            == "~/x, '~', --set=model.path=~/y ~"
        )
        assert without_home(f"There is no folder {place}.") == "There is no folder ~."
        for other in (f"{place}ice/x", f"{place}.old/x", f"{place}-2", f"/mnt{place}/x"):
            assert without_home(other) == other
    monkeypatch.setenv("HOME", "/")
    assert without_home("/etc") == "/etc"


def test_the_resolution_is_small_unless_another_is_asked_for(tmp_path: Path, tiny_pipeline: Path) -> None:
    from solrl_ray.cli.options import parser
    from solrl_ray.cli.validate import configuration

    file = model_file(tmp_path, "flux", tiny_pipeline, resolution=1024)

    def resolution(*given: str) -> int | tuple[int, int]:
        return configuration(parser().parse_args(["validate", str(file), *given])).config.model.resolution

    assert resolution() == 256
    assert resolution("--resolution", "512") == 512
    assert resolution("--resolution", "512x768") == (512, 768)
    assert resolution("--set", "model.resolution=128") == 128
    assert resolution("--set", "model.resolution=[64, 128]") == (64, 128)
    file = model_file(tmp_path, "flux", tiny_pipeline, resolution=[[768, 1024], [1024, 1024]])
    assert resolution() == (192, 256)

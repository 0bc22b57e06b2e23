"""What the command line refuses before anything is started, in one sentence."""

from __future__ import annotations

import argparse
import errno
import json
import re
from pathlib import Path

import pytest

from solrl_ray.cli import verbs
from tests.support.command_line import begin, refusal, solrl
from tests.support.sentences import names
from tests.support.tiny import build_flux2_klein, build_pipeline


@pytest.mark.parametrize(
    ("arguments", "key", "values"),
    [
        (["--gpu", "nothere.yaml"], "gpu", "'nothere.yaml'"),
        (["--gpu", "nothere/h200"], "gpu", "'nothere/h200'"),
        (["--gpu", "zzz"], "gpu", "'zzz' h100-80"),
        (["--cluster", "nothere.yaml"], "The configuration file nothere.yaml", ""),
        (["--set", "rewards.0.path=./no"], "rewards.0.path", "./no"),
    ],
)
def test_a_plan_of_a_fleet_cluster_or_reward_that_cannot_be_is_refused_before_it_is_printed(
    arguments: list[str], key: str, values: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert names(refusal(capsys, "plan", config_file, *arguments), key, values)


@pytest.mark.parametrize(
    ("settings", "key", "values"),
    [
        (["model.cfg.scale=4", f"model.cfg.negative_prompt={'dull ' * 40}"], "model.cfg.negative_prompt", "--set 16"),
        (
            ["evaluation.cfg.scale=4", f"evaluation.cfg.negative_prompt={'x y ' * 40}"],
            "evaluation.cfg.negative_prompt",
            "16",
        ),
        (
            ["model.path=black-forest-labs/FLUX.1-schnell", "evaluation.cfg.scale=4"],
            "evaluation.cfg.scale",
            "4 schnell 1",
        ),
        (["model.path={klein}", "model.cfg.scale=4"], "model.cfg.scale", "4 --set {klein} 1"),
        (
            ["model.family=flux2_klein", "model.cfg={scale: 4, negative_prompt: dull}"],
            "model.cfg.negative_prompt",
            '"dull"',
        ),
        (["model.guidance=3.5"], "model.guidance", "3.5 --set 1 model.cfg.scale"),
        (["model.family=sd3", "model.guidance=4.5"], "model.guidance", "4.5 'sd3' 1 model.cfg.scale"),
        (["model.family=sd3", "evaluation.guidance=4.5"], "evaluation.guidance", "4.5 'sd3' 1 evaluation.cfg.scale"),
        (["evaluation.cfg={scale: 4, interval: [0.2, 1.2]}"], "evaluation.cfg.interval.1", "1.2 1"),
    ],
)
def test_guidance_that_a_model_does_not_take_is_refused(
    settings: list[str], key: str, values: str, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"--set={each}" for each in settings]
    if "{klein}" in values:
        klein = build_flux2_klein(tmp_path / "distilled")
        index = klein / "model_index.json"
        index.write_text(json.dumps(json.loads(index.read_text()) | {"is_distilled": True}))
        arguments = [each.replace("{klein}", str(klein)) for each in arguments] + ["--set=model.family=flux2_klein"]
        arguments.append("--set=model.lora.targets=[to_q]")
        values = values.replace("{klein}", str(klein))
        capsys.readouterr()
    assert names(refusal(capsys, "plan", config_file, *arguments), key, values)


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        (["model.references=1"], "1 --set 'flux'"),
        (["model.family=flux_kontext"], "0 default 'flux_kontext' 1"),
        (["model.family=qwen_image_edit", "model.references=4"], "4 --set 'qwen_image_edit' 1 3"),
    ],
)
def test_a_number_of_references_that_a_family_does_not_take_is_refused_before_its_prompts(
    settings: list[str], values: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"--set={each}" for each in [*settings, "prompts.train=nothere.jsonl"]]
    assert names(refusal(capsys, "plan", config_file, *given), "model.references", values)


@pytest.mark.parametrize(
    ("resolution", "values"),
    [
        ("[18, 32]", "(--set) [18, 32] 4 16 20"),
        ("[[16, 16], [32, 3]]", "[[16, 16], [32, 3]] 4"),
    ],
)
def test_shapes_that_cannot_be_are_refused_with_what_would_be_right(
    resolution: str, values: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "plan", config_file, "--set", f"model.resolution={resolution}")
    assert names(said, "model.resolution", values)


def test_a_prompt_that_names_no_shape_of_the_run_is_refused_by_its_line(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"text": "a", "resolution": 16}\n{"text": "b", "resolution": [16, 32]}\n')
    said = refusal(capsys, "plan", config_file, "--set", f"prompts.train={file}")
    assert names(said, "prompts.train", "--set train.jsonl 2 [16, 32] [16, 16]")


def test_a_distilled_checkpoint_in_the_hubs_cache_is_known_by_its_id(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = tmp_path / "hub" / "models--black-forest-labs--FLUX.1-schnell" / "snapshots" / "741f7c3c"
    build_pipeline(snapshot)
    capsys.readouterr()
    said = refusal(capsys, "plan", config_file, f"--set=model.path={snapshot}", "--set=evaluation.cfg.scale=4")
    assert names(said, "evaluation.cfg.scale", f"4 --set 1 {snapshot}")


@pytest.mark.parametrize(("gpu", "meant"), [("h100", "h100-80"), ("4090", "rtx4090")])
def test_a_card_that_is_nearly_a_listed_one_is_named(
    gpu: str, meant: str, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text(f"gpu: '{gpu}'\n")
    for option in (("--gpu", gpu), ("--cluster", tmp_path / "cluster.yaml")):
        said = refusal(capsys, "plan", config_file, *option)
        assert names(said, "gpu", repr(gpu))
        assert said.endswith(f"did you mean {meant}?")


def test_what_an_evaluation_cannot_be_asked_for_is_refused_by_its_option(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tmp_path / "runs" / "small", config_file)
    for option, value, key in (("--solver", "heun", "rollout.solver"), ("--samples", "0", "evaluation.samples")):
        # Several rewards are no reason to refuse.
        asked = ("--rewards", "pickscore", "hpsv2", option, value)
        assert names(refusal(capsys, "eval", tmp_path / "runs" / "small", *asked), key, f"{option} {value}")


@pytest.mark.parametrize(
    ("arguments", "key", "values"),
    [
        (["--set", "rollout.keep=10"], "rollout.keep", "10 rollout.pool 8"),
        (["--set", "model.path=./nowhere"], "model.path", "'./nowhere'"),
        (["--set", "rewards.0.path=./nowhere"], "rewards.0.path", "./nowhere"),
        (["--set", "rewards.0.path=."], "rewards.0.path", ""),
        (["--set", "rewards.0.kind=clip"], "rewards.0.kind", "'clip'"),
        (["--set", "rewards.0={kind: 'no_module:f'}"], "rewards.0.kind", "'no_module:f'"),
        (["--set", "evaluation.reference=math:no"], "evaluation.reference", "'math:no'"),
        (
            ["--set", "evaluation.reference=solrl_ray.testbed.world:picture", "--dry-run"],
            "evaluation.reference",
            "'solrl_ray.testbed.world:picture'",
        ),
        (["--set", "rollout.explore.precision=fp8"], "rollout.explore.precision", "'fp8' 8.9 fleet.explorers.num_gpus"),
        (["--set", "model.quantization.min_features=9999"], "model.quantization", "9999"),
        (["--set", "model.lora.targets=[to_x]"], "model.lora.targets", "'to_x'"),
        (["--set", "checkpoints.min_free_gb=1e9"], "run.root", "free"),
        (["--wrong"], "Unrecognized arguments:", "--wrong"),
        (["--dry-run", "two_stage", "--wrong"], "Unrecognized arguments:", "--wrong"),
        (["--set", "run.seed=1", "run.name=a"], "Unrecognized arguments:", "run.name=a"),
        (["--dry-run", "two_stge"], "There is no configuration two_stge,", "two_stage"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    arguments: list[str], key: str, values: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert names(refusal(capsys, "train", config_file, *arguments), key, values)
    assert not (config_file.parent / "runs").exists()


def test_held_out_prompts_must_not_be_trained_on(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "heldout.txt").write_text("a red cross\na blue cross\n")
    message = refusal(capsys, "plan", config_file)
    assert "1 of its prompts are also in prompts.train, such as 'a blue cross'" in message


def test_a_misspelt_command_is_answered_with_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "trian", "demo").endswith("did you mean train?")
    assert refusal(capsys, "prompts", "improt").endswith("did you mean import?")
    assert "did you mean" not in refusal(capsys, "xyz")


def test_commands_without_what_they_need_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys).startswith("The following arguments are required: COMMAND")
    assert refusal(capsys, "plan").startswith("No configuration was given")
    assert refusal(capsys, "train", "--resume").startswith("--resume needs a run folder or the run's configuration")
    assert refusal(capsys, "report", tmp_path) == f"{tmp_path} is not a run folder: it has no config.yaml."
    assert refusal(capsys, "train", "--resume", tmp_path) == f"{tmp_path} is not a run folder: it has no config.yaml."


def test_a_home_is_expanded_in_the_folder_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert refusal(capsys, "train", "--resume=~/gone") == f"{tmp_path}/gone is not a run folder: it has no config.yaml."
    assert refusal(capsys, "train", "--resume=~nobody-here/run").startswith("--resume is '~nobody-here/run', but this")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "/runs/a/report.html"), "/runs/a/report.html: Permission"),
        (FileNotFoundError(errno.ENOENT, "No such file", "runs/a"), "runs/a: No such file"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/proc/7/stat"), None),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), None),  # another pipe than the one that is printed to
        (OSError(errno.EBADF, "Bad file descriptor"), None),
        (OSError("the file of a library is damaged"), None),
    ],
)
def test_what_the_system_refuses_is_one_sentence_and_our_own_mistakes_keep_their_place(
    error: OSError, sentence: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(verbs, "report", failing)
    if sentence is None:
        with pytest.raises(OSError, match=re.escape(str(error))):
            solrl("report", "runs/a")
    else:
        assert solrl("report", "runs/a") == 1
        assert capsys.readouterr().err.startswith(f"error: {sentence}")

"""``solrl export``: a policy of a run in each format, and the sentences if it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from solrl_ray.config.loading import to_yaml
from solrl_ray.config.schema import Config
from solrl_ray.models import paths
from solrl_ray.policy.digest import lora_digest
from solrl_ray.storage import continuation
from solrl_ray.storage.run_folder import RunFolder
from solrl_ray.storage.warm_start import warm_start
from tests.support import made_runs
from tests.support.command_line import refusal, solrl
from tests.support.made_checkpoints import checkpointed, state
from tests.support.sentences import names
from tests.support.small import small_config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return checkpointed(tmp_path, "small")


@pytest.mark.parametrize("kind", ["diffusers", "comfyui", "kohya"])
@pytest.mark.parametrize(("options", "updates", "policy"), [((), 2, "ema"), (("--updates", "1"), 1, "default")])
def test_a_run_begins_with_the_policy_of_an_exported_file(
    kind: str, options: tuple[str, ...], updates: int, policy: str, config: Config
) -> None:
    run = RunFolder.of(config).path
    assert solrl("export", run, "--format", kind, "--policy", policy, *options) == 0
    (file,) = (run / "export" / kind).iterdir()
    _, first = warm_start(small_config(run.parent, "fork", f"run.init='{file}'"))
    assert lora_digest(first.default) == lora_digest(getattr(state(config, updates), policy))


def test_the_command_says_what_it_wrote_and_which_rank_it_has(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = RunFolder.of(config).path, tmp_path / "loras"
    assert solrl("export", run, "--format", "kohya", "--out", out) == 0
    file = out / "small.safetensors"
    # Of the double block: the output, and q, k, v in one; of the single ones q, k, v, proj_mlp in one.
    ranks = [len(tensor) for key, tensor in load_file(file).items() if key.endswith("lora_down.weight")]
    said = "rank 16 of 1 linear, rank 48 of 1 linear, rank 64 of 5 linears"
    written, readers = capsys.readouterr().out.splitlines()
    assert written == f"written: {file}: ema after update 2, {said}"
    assert names(readers, "for", "sd-scripts musubi-tuner")
    assert sorted(ranks) == [16, 48, *[64] * 5]


@pytest.mark.parametrize("kind", ["kohya", "checkpoint"])
def test_a_run_from_a_machine_with_another_place_for_its_base_is_exported_with_the_one_here(
    kind: str, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, base = RunFolder.of(config).path, tmp_path / "base"
    base.symlink_to(paths.resolve(config.model.path))
    moved = config.model_copy(update={"model": config.model.model_copy(update={"path": "/not/here"})})
    (run / "config.yaml").write_text(to_yaml(moved))
    for given, key in (((), "model.path"), (("--base", "/nor/here"), "--base")):
        said = refusal(capsys, "export", run, "--format", kind, *given)
        assert names(said, key, given[-1] if given else "/not/here --base")
    assert solrl("export", run, "--format", kind, "--base", base) == 0
    assert list((run / "export" / kind).iterdir())


def test_what_cannot_be_exported_is_one_sentence(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder.of(config).path
    (tmp_path / "file").touch()
    assert "comfy" in refusal(capsys, "export", run, "--format", "comfy")
    assert "--updates is 7" in refusal(capsys, "export", run, "--format", "kohya", "--updates", "7")
    assert "it must be a folder" in refusal(capsys, "export", run, "--format", "kohya", "--out", tmp_path / "file")
    (tmp_path / "a.safetensors").mkdir()
    said = refusal(capsys, "export", run, "--format", "kohya", "--out", tmp_path / "a.safetensors")
    assert names(said, "--out", "a.safetensors folder")
    said = refusal(capsys, "export", run, "--format", "checkpoint", "--out", tmp_path / "b.safetensors")
    assert names(said, "--out", "b.safetensors folder")
    assert "is not a run folder" in refusal(capsys, "export", tmp_path, "--format", "kohya")
    assert "already exists" in refusal(capsys, "export", run, "--format", "checkpoint", "--out", tmp_path)


def test_the_best_evaluated_policy_is_exported_from_a_run_that_ended_with_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, start, last = made_runs.evaluations()
    top = made_runs.evaluation(1, "ema", {"aa": (0.9,) * 2, "bb": (0.9,) * 2, "cc": (0.9,) * 2})
    run = made_runs.write_run(tmp_path / "run", evaluated=[base, start, top, last])
    config = continuation.stored(run)
    for updates in (1, 3):
        state(config, updates).save(RunFolder(run).checkpoint(updates))
    assert solrl("export", run, "--format", "diffusers", "--best") == 0
    assert "ema after update 1," in capsys.readouterr().out
    unfinished = made_runs.write_run(tmp_path / "unfinished", finished=False)
    assert "names no best" in refusal(capsys, "export", unfinished, "--format", "diffusers", "--best")


@pytest.mark.parametrize("kind", ["diffusers", "comfyui", "kohya"])
def test_a_file_with_other_content_is_overwritten_with_force_alone(
    kind: str, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = RunFolder.of(config).path, tmp_path / "my.safetensors"
    file.write_bytes(b"somebody's")
    command = ("export", run, "--format", kind, "--out", file)
    assert names(refusal(capsys, *command), str(file), "--out --force")
    assert file.read_bytes() == b"somebody's"
    assert solrl(*command, "--force") == 0
    first = file.read_bytes()
    assert solrl(*command) == 0  # the same bytes
    assert file.read_bytes() == first
    capsys.readouterr()
    assert names(refusal(capsys, *command, "--policy", "default"), str(file), "--force")
    assert file.read_bytes() == first


@pytest.mark.parametrize(("kind", "alpha"), [("diffusers", "16"), ("comfyui", "16"), ("kohya", "32")])
def test_an_exported_file_says_what_tools_show(kind: str, alpha: str, config: Config, tmp_path: Path) -> None:
    file = tmp_path / "my-style.safetensors"
    moved = config.model_copy(
        update={"model": config.model.model_copy(update={"path": "black-forest-labs/FLUX.1-dev"})}
    )
    (RunFolder.of(config).path / "config.yaml").write_text(to_yaml(moved))
    base = () if kind == "diffusers" else ("--base", config.model.path)
    assert solrl("export", RunFolder.of(config).path, "--format", kind, "--out", file, *base) == 0
    with safe_open(file, framework="pt") as content:
        said = content.metadata()
    named = "FLUX.1-dev" if kind == "diffusers" else "pipeline"
    assert said["modelspec.sai_model_spec"] == "1.0.1"
    assert said["modelspec.architecture"] == f"{named.lower().replace('.', '-')}/lora"
    assert said["modelspec.title"] == said["ss_output_name"] == "my-style"
    assert said["modelspec.resolution"] == "32x32"
    assert "ema after update 2" in said["modelspec.description"]
    assert (said["ss_sd_model_name"], said["ss_network_dim"], said["ss_network_alpha"]) == (named, "16", alpha)


@pytest.mark.parametrize("kind", ["diffusers", "kohya", "checkpoint"])
def test_an_older_policy_is_written_only_if_it_is_asked_for(
    kind: str, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder.of(config)
    (run.checkpoint(2) / "policy.safetensors").write_bytes(b"damaged")
    said = refusal(capsys, "export", run.path, "--format", kind)
    assert names(said, f"The newest checkpoint of {run.path}, after 2", "policy.safetensors --updates 1")
    assert not (run.path / "export").exists()
    assert solrl("export", run.path, "--format", kind, "--updates", "1") == 0
    assert "ema after update 1" in capsys.readouterr().out

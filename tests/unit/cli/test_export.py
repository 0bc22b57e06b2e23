"""``solrl export``: a policy of a run in each format, and the sentences if it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
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
    assert capsys.readouterr().out == f"written: {file}: ema after update 2, {said}\n"
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
    assert "is not a run folder" in refusal(capsys, "export", tmp_path, "--format", "kohya")
    assert "is there already" in refusal(capsys, "export", run, "--format", "checkpoint", "--out", tmp_path)


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

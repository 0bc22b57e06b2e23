"""The first policy of a run from another run, a checkpoint or a LoRA file: once, and then it is the run's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from solrl_ray import models
from solrl_ray.cli import main
from solrl_ray.config.loading import load, to_yaml
from solrl_ray.config.schema import Config
from solrl_ray.errors import UserError
from solrl_ray.learning.state import LearnerState
from solrl_ray.policy import adapters
from solrl_ray.policy.digest import lora_digest
from solrl_ray.policy.saving import save_lora
from solrl_ray.storage import continuation
from solrl_ray.storage.continuation import FORMAT, FORMAT_FILE
from solrl_ray.storage.resume import resume_point
from solrl_ray.storage.run_folder import RunFolder
from solrl_ray.storage.warm_start import factor_shapes, warm_start
from tests.support.made_checkpoints import checkpointed, factors, state
from tests.support.small import small_config


@pytest.fixture
def source(tmp_path: Path) -> Config:
    """The configuration of a run with checkpoints after 1 and 2 updates."""
    return checkpointed(tmp_path, "source")


def forked(source: Config, init: Path, *more: str) -> Config:
    return small_config(Path(source.run.root), "fork", f"run.init='{init}'", *more)


def test_the_factor_shapes_are_those_that_a_learner_has(source: Config) -> None:
    model = models.load(source.model, "cpu", components={"transformer"})
    assert isinstance(model.transformer, nn.Module)
    adapters.attach(model.transformer, source.model.lora, 1)
    found = adapters.parameters(model.transformer, "default")
    assert {name: value.shape for name, value in found.items()} == factor_shapes(source)


def test_a_run_gives_its_newest_three_policies_and_no_moments(source: Config) -> None:
    config, first = warm_start(forked(source, RunFolder.of(source).path))
    newest = state(source, 2)
    assert first.updates == 0
    for part in ("default", "old", "ema"):
        found, wanted = getattr(first, part), getattr(newest, part)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), part
    assert all(not moment.any() for moment in (*first.exp_avg.values(), *first.exp_avg_sq.values()))
    assert first.exp_avg.keys() == newest.exp_avg.keys()
    assert config.run.init_digest == lora_digest(newest.default)


def test_a_checkpoint_folder_gives_that_checkpoint(source: Config) -> None:
    _, first = warm_start(forked(source, RunFolder.of(source).checkpoint(1)))
    assert lora_digest(first.ema) == lora_digest(state(source, 1).ema)


def test_a_damaged_newest_checkpoint_is_told_where_an_older_one_is_taken(
    source: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    (RunFolder.of(source).checkpoint(2) / "policy.safetensors").write_bytes(b"")
    _, first = warm_start(forked(source, RunFolder.of(source).path))
    assert lora_digest(first.default) == lora_digest(state(source, 1).default)
    said = capsys.readouterr().err
    assert said.startswith("note: the checkpoint after 2 updates is skipped: ")
    assert said.endswith("; using the one after 1\n")
    warm_start(forked(source, RunFolder.of(source).path))  # the checks of a run read it twice
    assert capsys.readouterr().err == ""


def test_a_lora_file_is_all_three_policies(source: Config, tmp_path: Path) -> None:
    given = factors(source, 3)
    file = save_lora(tmp_path / "lora", given, source.model.lora)
    for init in (file, file.parent):
        _, first = warm_start(forked(source, init))
        assert {lora_digest(first.default), lora_digest(first.old), lora_digest(first.ema)} == {lora_digest(given)}
        first.save(tmp_path / "state")
        assert lora_digest(LearnerState.load(tmp_path / "state").old) == lora_digest(given)


def test_a_lora_file_keeps_its_strength_under_another_alpha(source: Config, tmp_path: Path) -> None:
    given = factors(source, 3)
    file = save_lora(tmp_path / "lora", given, source.model.lora)  # 32 / 16
    _, first = warm_start(forked(source, file, "model.lora.alpha=8"))  # 8 / 16
    for name, factor in given.items():
        assert torch.equal(first.ema[name], factor * 4 if name.endswith("lora_B") else factor)


@pytest.mark.parametrize("targets", ["to_q, to_k", "to_q, to_k, to_v, to_out.0, proj_mlp, proj_out"])
def test_a_lora_file_of_other_linears_is_refused_with_the_targets_that_fit(
    targets: str, source: Config, tmp_path: Path
) -> None:
    file = save_lora(tmp_path / "lora", factors(source, 3), source.model.lora)
    with pytest.raises(UserError, match=r"^run\.init .* such as [\w.]+; ") as refused:
        warm_start(forked(source, file, f"model.lora.targets=[{targets}]"))
    fitting = str(refused.value).partition("model.lora.targets=")[2].removesuffix(".")
    assert warm_start(forked(source, file, f"model.lora.targets={fitting}"))[1].ema.keys() == factors(source, 3).keys()


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("model.lora.rank=8", r"^run\.init is '.*source' \(default\), .*rank 16 and alpha 32, .* rank 8 and alpha 32"),
        ("model.lora.alpha=16", r"^run\.init .*rank 16 and alpha 32, but model\.lora .* alpha 16"),
        ("model.lora.targets=[to_q]", r"^run\.init is .*source"),
        ("model.path=/elsewhere", r"^run\.init is .*'builtin:testbed/pipeline', .* '/elsewhere'"),
        ("run.init_digest=feed", r"whose digest is [0-9a-f]{64}, but run\.init_digest is feed"),
    ],
)
def test_a_lora_that_does_not_fit_is_one_sentence(source: Config, override: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        warm_start(forked(source, RunFolder.of(source).path, override))


def test_what_is_no_policy_is_one_sentence(source: Config, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^run\.init is '{tmp_path}' \(default\)"):
        warm_start(forked(source, tmp_path))
    with pytest.raises(UserError, match=r"^run\.init is '.*nowhere' \(default\)"):
        warm_start(forked(source, tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / FORMAT_FILE).write_text(str(FORMAT))
    (tmp_path / "empty" / "config.yaml").write_text(to_yaml(source))
    with pytest.raises(UserError, match=r"^run\.init is '.*empty' \(default\)"):
        warm_start(forked(source, tmp_path / "empty"))


def test_the_run_has_its_first_state_in_its_own_folder_and_never_reads_the_source_again(source: Config) -> None:
    config, first = warm_start(forked(source, RunFolder.of(source).path))
    run = RunFolder.of(config)
    run.create(config, resume=False, first=first)
    run.lock.release()
    (RunFolder.of(source).path).rename(Path(source.run.root) / "gone")
    point = resume_point(run, iterations=3, init=config.run.init)
    assert point.updates == 0
    assert point.state is not None
    assert all(torch.equal(point.state.ema[name], first.ema[name]) for name in first.ema)
    stored = continuation.stored(run.path)
    assert (stored.run.init, stored.run.init_digest) == (config.run.init, config.run.init_digest)
    assert main(["train", "--dry-run", "--resume", str(run.path)]) == 0


def test_a_warm_start_that_was_cut_short_is_not_resumed_from_the_base(source: Config) -> None:
    config, first = warm_start(forked(source, RunFolder.of(source).path))
    run = RunFolder.of(config)
    run.create(config, resume=False, first=first)
    subprocess.run(["rm", "-r", str(run.checkpoint(0))], check=True)
    with pytest.raises(UserError, match=rf"{run.path} .*source"):
        resume_point(run, iterations=3, init=config.run.init)


def test_a_warm_start_that_trained_nothing_can_be_begun_again_as_another_run(source: Config) -> None:
    config, first = warm_start(forked(source, RunFolder.of(source).path))
    run = RunFolder.of(config)
    run.create(config, resume=False, first=first)
    run.lock.release()
    run.create(small_config(Path(source.run.root), "fork"), resume=False)
    assert run.checkpoints() == []


def test_a_fork_has_the_configuration_of_its_source(source: Config, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.of(source).path
    command = ["train", "--from", str(folder), "--set", "run.iterations=7", "--dry-run"]
    assert main([*command, "--set", "run.name=fork"]) == 0
    assert "fork · 7 iterations" in " ".join(capsys.readouterr().out.split())
    assert main(["train", "--from", str(folder / "nothing"), "--dry-run"]) == 2
    assert "nothing is neither a run folder nor a checkpoint of a run; for a LoRA file" in capsys.readouterr().err


def test_a_resumed_run_keeps_the_digest_that_it_wrote_down(source: Config) -> None:
    given = forked(source, Path("x"))
    was = given.model_copy(update={"run": given.run.model_copy(update={"init_digest": "feed"})})
    assert continuation.inherit_from(given, was) == was
    assert load([RunFolder.of(source).path / "config.yaml"]).run.init_digest == ""


def test_the_base_is_a_policy_whose_b_is_zero(source: Config) -> None:
    given = factors(source, 1)
    base = adapters.base_factors(given)
    assert base.keys() == given.keys()
    assert all(not value.any() for name, value in base.items() if name.endswith("lora_B"))
    assert all(torch.equal(value, given[name]) for name, value in base.items() if name.endswith("lora_A"))


@pytest.mark.parametrize("named", [True, False])
def test_continue_begins_a_fork_and_resumes_it(named: bool, source: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that a queue repeats, whatever became of its first attempt."""
    origin = RunFolder.of(source).path
    files = [str(origin / "config.yaml")] if named else []
    command = ["train", *files, "--from", str(origin), "--set", "run.name=fork", "--continue", "--dry-run"]
    assert main(command) == 0
    config, first = warm_start(forked(source, origin))
    run = RunFolder.of(config)
    run.create(config, resume=False, first=first)
    run.lock.release()
    run.journal(0).append({"kind": "open"})
    capsys.readouterr()
    assert main(command) == 0
    assert main([*command, "--set", "run.seed=9"]) == 2
    assert "run.seed is 9 (--set), but the run in" in capsys.readouterr().err
    assert main(["train", "--resume", str(run.path), "--from", str(origin), "--dry-run"]) == 2
    assert "but --resume continues the policy of" in capsys.readouterr().err

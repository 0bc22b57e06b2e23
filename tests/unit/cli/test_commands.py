"""The command line: what it prints and how it ends."""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from solrl_ray.cli.options import parser
from solrl_ray.common import ray_auth
from solrl_ray.config.loading import load, to_yaml
from solrl_ray.planning import outline
from solrl_ray.storage.run_folder import RunFolder
from tests.support import made_runs
from tests.support.command_line import printed, refusal, solrl
from tests.support.made_configs import changed
from tests.support.sentences import names


def _commands(found: argparse.ArgumentParser, words: str = "solrl") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield words, found
    for action in found._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _commands(inner, f"{words} {name}")


def test_every_command_prints_its_help() -> None:
    for words, command in _commands(parser()):
        assert command.format_help().startswith(f"usage: {words}")


@pytest.mark.parametrize("command", [["plan"], ["train", "--dry-run"]])
def test_the_arithmetic_is_printed_and_nothing_is_started(
    command: list[str], config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(printed(capsys, *command, config_file, "-v").split())
    assert "2 prompts × 8 seeds = 16 candidates × 6 steps (dpm2, auto: nvfp4-emulated on CPUs)" in text
    assert "8 samples × 10 steps (float32)" in text
    assert "3 to train on, 2 held out" in text
    assert "after the first iteration" in text
    assert "note: 4 of 5 prompts are longer than the 12 tokens that tokenizer_2 of" in text
    assert ("dry run: all checks passed, nothing was started" in text) == (command[0] == "train")
    assert not (config_file.parent / "runs").exists()


def test_a_plan_is_a_verdict_and_about_twelve_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "plan", "flux1_dev_80gb", "--gpu", "h100-80").splitlines()
    assert lines[0] == "fits: about 61 min for 200 iterations on 1 × NVIDIA H100 80GB; peak 56.9 of 85.5 GB"
    assert len(lines) < 15
    assert "prompts.train, prompts.heldout, model.path" in lines[-1]
    assert printed(capsys, "plan", "flux1_dev_80gb", "--gpu", "H100-80").splitlines() == lines
    whole = printed(capsys, "plan", "-v", "flux1_dev_80gb", "--gpu", "h100-80").splitlines()
    assert whole[0] == lines[0]
    assert len(whole) > 50
    assert not any(line.startswith(("fits", "does not fit")) for line in printed(capsys, "plan", "demo").splitlines())


def test_a_plan_notes_each_reward_checkpoint_that_the_run_will_need(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = "rewards=[{kind: clipscore, path: nobody/first}, {kind: clipscore, path: nobody/second}]"
    said = " ".join(printed(capsys, "plan", "-v", config_file, "--set", elsewhere).split())
    for number, path in enumerate(("nobody/first", "nobody/second")):
        assert f"note: before the run starts: rewards.{number}.path (--set) is '{path}'" in said


def test_who_computes_a_large_model_on_cpus_is_told(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = ["--set", "fleet.explorers.num_gpus=1", "--set", "fleet.learners.num_gpus=1"]
    assert "num_gpus" not in printed(capsys, "plan", config_file)
    monkeypatch.setattr(outline, "LARGE", 1000)
    assert solrl("plan", config_file) == 0
    lacking = "fleet.explorers, fleet.regenerators, fleet.learners"
    assert f"note: num_gpus of {lacking} is 0, so " in capsys.readouterr().out
    assert solrl("plan", config_file, *gpus) == 0
    assert "note: num_gpus of fleet.regenerators is 0, so " in capsys.readouterr().out
    assert "num_gpus" not in printed(capsys, "plan", config_file, *gpus, "--set", "fleet.regenerators.num_gpus=1")


def test_with_a_list_of_costs_the_plan_says_how_long_it_takes(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from solrl_ray.planning.model_facts import model_facts

    assert solrl("plan", "-v", config_file, "--gpu", "h200") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "time shown after the first iteration, by its pace: the price list of NVIDIA H200 has no " in said
    model = load([config_file]).model
    figure = "{ms: 2.0, measured: true, source: here}"
    costs = tmp_path / "costs.yaml"
    costs.write_text(
        "gpu: here\nfastest: nvfp4-emulated\nmodels:\n"
        f"- {{family: {model.family}, parameters: {model_facts(load([config_file])).parameters}, "
        f"resolution: {model.resolution}, steps: {{nvfp4-emulated: {figure}, float32: {figure}}}, "
        f"decode_and_reward: {figure}, forward: {figure}, backward: {figure}, backward_checkpointed: {figure}, "
        f"publication: {figure}, load: {figure}, checkpoint: {figure}}}\n"
    )
    capsys.readouterr()
    sizes = ("fleet.explorers.count=5", "fleet.regenerators.count=1", "learner.world_size=2")
    assert solrl("plan", "-v", config_file, "--gpu", costs, *(word for size in sizes for word in ("--set", size))) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("about ")
    assert "for 3 iterations on 8 × here" in text
    assert "5 explorers" in text
    assert "s an iteration on 8 × here: explore" in text
    assert "after the first iteration" not in text
    assert "ESTIMATED none of these times" in text


FLUX = ("flux1_dev", "two_stage", "diffusion_nft", "pickscore", "one_gpu", "--set", "prompts={train: t, heldout: h}")


def test_a_plan_refuses_a_card_that_the_run_does_not_fit_after_saying_what_it_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert solrl("plan", "-v", *FLUX, "--set", "learner.activation_memory=0.5", "--gpu", "l40s") == 2
    said = capsys.readouterr()
    assert "NVIDIA L40S need 71.7 GB to learn" in said.err
    assert said.out.startswith("does not fit: peak ")
    assert "it fits with --set " in said.out.splitlines()[0]
    assert "learner rank 33.8 GB (transformer 23.8 GB, " in " ".join(said.out.split())


def test_a_plan_that_no_setting_makes_fit_says_where_models_that_do_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert solrl("plan", *FLUX, "--gpu", "rtx4090") == 2
    said = capsys.readouterr().err
    assert "40.3 GB" in said
    assert said.endswith("; a table in the README shows which models train on which GPU.\n")


def test_a_plan_refuses_a_card_that_lacks_the_previews_precision(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("flux1_dev_80gb", "--set", "prompts={train: t, heldout: h}", "--gpu", "a100-80")
    said = refusal(capsys, "plan", *given)
    assert names(said, "rollout.explore.precision", "fp8 one_gpu_80gb.yaml NVIDIA A100 80GB auto")
    assert solrl("plan", *given, "--set", "rollout.explore.precision=auto") == 0
    assert capsys.readouterr().out.startswith("fits: about ")


def test_a_plan_refuses_a_reward_that_lacks_what_it_reads(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "plan", *FLUX, "--gpu", "h200", "--set", "rewards=[{kind: clipscore}]")
    assert names(said, "rewards.0.kind", "'clipscore' path")


def test_a_card_without_prices_is_told_whether_the_run_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = tmp_path / "card.yaml"
    card.write_text("{gpu: ours, fastest: bf16, memory_gb: 100}")
    said = " ".join(printed(capsys, "plan", "-v", *FLUX, "--gpu", card).split())
    assert said.startswith("fits: peak 72 of 100 GB on ours;")
    assert "× 6 steps (dpm2, bf16)" in said  # what auto means there
    assert "fits peak 72 GB of the 100 GB of ours, of which 95 GB (95%) is usable" in said
    assert "time shown after the first iteration, by its pace: the price list of ours has no flux at 512 px" in said


def test_options_may_stand_before_after_and_between_files(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = tmp_path / "more.yaml"
    more.write_text("run: {iterations: 7}")
    for arguments in (
        ["--set", "run.seed=5", config_file, more],
        [config_file, more, "--set", "run.seed=5"],
        [config_file, "--set", "run.seed=5", more],
        ["--set", "run.seed=5", config_file, "--set", "fleet.regenerators.count=1", more],
        [config_file, "--set", "run.seed=5", more, "--set", "fleet.regenerators.count=1", "diffusion_nft"],
    ):
        assert solrl("plan", *arguments) == 0
        assert "7 iterations, one optimiser step each · seed 5" in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def no_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else runs on this machine is not looked at."""
    monkeypatch.setattr(ray_auth, "clusters_here", list)


@pytest.mark.usefixtures("no_clusters")
def test_the_status_of_a_run_that_nobody_works_on_is_what_its_folder_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = printed(capsys, "status", made_runs.write_run(tmp_path / "ended"))
    assert "iteration 3 of 3   done" in shown
    assert "elapsed 0:36" in shown  # 36.5 s, as in its summary
    shown = printed(capsys, "status", made_runs.write_run(tmp_path / "open", done=2, finished=False))
    assert "iteration 3 of 3   not running" in shown
    assert shown.endswith(f"resume with  solrl train --resume {tmp_path / 'open'}\n")
    assert "0.300 → 0.310" in shown
    assert "elapsed 0:24" in shown  # two iterations of 10 s and three evaluations of 1.5 s: 24.5 s
    longer = made_runs.write_run(tmp_path / "longer")
    (longer / "config.yaml").write_text(to_yaml(made_runs.config(iterations=5)))  # as a resumed run does
    assert "iteration 4 of 5   not running" in printed(capsys, "status", longer)
    assert refusal(capsys, "status", tmp_path).startswith(f"{tmp_path} is not the folder of a run")
    assert refusal(capsys, "status").startswith("No run is live on a cluster of this machine; name a run folder")


@pytest.mark.usefixtures("no_clusters")
def test_the_status_of_a_run_that_is_starting_or_was_killed_meanwhile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = changed(made_runs.config(), run={"root": str(tmp_path)})
    run = RunFolder.of(config)
    run.path.mkdir()
    run.create(config, resume=False)
    run.note_start(["solrl", "train", "my.yaml"])
    shown = printed(capsys, "status", run.path)
    assert "starting: waiting for its cluster or its controller" in shown
    assert "a process uses this run folder: the run is starting or ending" in shown
    assert "go on with" not in shown
    run.lock.release()
    shown = printed(capsys, "status", run.path)
    assert "not running: it ended while it was starting, and nothing" in shown
    assert "with: solrl train my.yaml" in " ".join(shown.split())
    assert shown.endswith(f"resume with  solrl train --resume '{run.path}'\n")  # its name has a space


def test_the_status_of_a_run_whose_cluster_does_not_answer_is_no_guess(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_auth, "clusters_here", lambda: ["127.0.0.1:1"])  # its node is not gone yet
    path = made_runs.write_run(tmp_path / "run")
    run = RunFolder(path)
    assert solrl("status", path) == 0
    run.lock.acquire(seconds=0)
    capsys.readouterr()
    assert solrl("status", path) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: a process uses {path}, but the Ray cluster at 127.0.0.1:1 could not be join")
    run.lock.release()


@pytest.mark.usefixtures("no_clusters")
def test_pools_are_scaled_of_runs_that_are_live(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = made_runs.write_run(tmp_path / "ended")
    for run, said in (([], "No run is live"), ([ended], str(ended)), ([tmp_path], "config.yaml")):
        assert said in refusal(capsys, "pool", "scale", *run, "--explorers", "2")


@pytest.mark.parametrize("unbuffered", [False, True])
def test_who_stops_reading_ends_a_command_without_a_word(
    unbuffered: bool, config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with io.TextIOWrapper(os.fdopen(writing, "wb", 0 if unbuffered else -1), write_through=unbuffered) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert solrl("plan", config_file) == 141
    assert capsys.readouterr().err == ""


def test_ray_builds_no_other_environment_for_workers_under_uv_run() -> None:
    code = "from solrl_ray.cli import main; main(['list']); from ray._private import ray_constants as r; print(r.{})"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", code.format("RAY_ENABLE_UV_RUN_RUNTIME_ENV")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"

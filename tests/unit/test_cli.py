"""The command line: what it prints, how it ends, and what it refuses before anything is started."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import solrl_ray
from solrl_ray import run_folder
from solrl_ray.cli import main, verbs
from solrl_ray.config.loading import load, to_yaml
from solrl_ray.report.trace import Span, SpanWriter
from solrl_ray.run_folder import RunFolder
from tests import tiny
from tests.unit import made_runs


@pytest.fixture
def config(tmp_path: Path, tiny_pipeline: Path, tiny_clip: Path) -> Path:
    """A whole small run whose files are all there."""
    (tmp_path / "train.txt").write_text("a red ring\na blue cross\na green disc\n")
    (tmp_path / "heldout.txt").write_text("a red cross\na blue disc\n")
    file = tmp_path / "config.yaml"
    file.write_text(f"""
run: {{name: small, root: {tmp_path / "runs"}, iterations: 3}}
model:
  family: flux
  path: {tiny_pipeline}
  dtype: float32
  resolution: {tiny.RESOLUTION}
  max_sequence_length: {tiny.T5_TOKENS}
  schedule: {{kind: flux}}
  lora: {{rank: 4, targets: [to_q, to_k]}}
prompts: {{train: {tmp_path / "train.txt"}, heldout: {tmp_path / "heldout.txt"}}}
rewards: [{{kind: clipscore, path: {tiny_clip}}}]
rollout: {{prompts: 2, pool: 8, keep: 4, preview: {{micro_batch: 8}}, full: {{micro_batch: 4}}}}
learner: {{micro_batch: 4}}
evaluation: {{prompts: 2, pictures: 1}}
""")
    return file


def solrl(*arguments: str | Path) -> int:
    return main([str(argument) for argument in arguments])


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line that a refused command prints."""
    assert solrl(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("error: ").strip()


def begin(folder: Path, config: Path, *overrides: str) -> None:
    """Leave behind what a run leaves behind when it has just begun."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(load([config], overrides)))


@pytest.mark.parametrize("command", [["plan"], ["train", "--dry-run"]])
def test_the_arithmetic_is_printed_and_nothing_is_started(
    command: list[str], config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert solrl(*command, config) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "2 prompts × 8 seeds = 16 candidates × 6 steps (dpm2, nvfp4-emulated)" in text
    assert "8 samples × 10 steps (float32)" in text
    assert "3 to train on, 2 held out" in text
    assert "note: 4 of 5 prompts are longer than the 12 tokens that tokenizer_2 of" in text
    assert not (config.parent / "runs").exists()


def test_with_a_list_of_costs_the_plan_says_how_long_it_takes(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from solrl_ray.preflight import model_facts

    assert solrl("plan", config, "--gpu", "h200") == 2
    assert "has nothing like" in capsys.readouterr().err
    model = load([config]).model
    figure = "{ms: 2.0, measured: true, source: here}"
    costs = tmp_path / "costs.yaml"
    costs.write_text(
        f"gpu: here\nfastest: fp8\npublication: {figure}\nload: {figure}\ncheckpoint: {figure}\nmodels:\n"
        f"- {{family: {model.family}, parameters: {model_facts(load([config])).parameters}, "
        f"resolution: {model.resolution}, steps: {{nvfp4-emulated: {figure}, float32: {figure}}}, "
        f"decode_and_reward: {figure}, forward: {figure}, backward: {figure}}}\n"
    )
    capsys.readouterr()
    assert solrl("plan", config, "--gpu", costs, "--explorers", "5", "--regenerators", "1", "--learners", "2") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "5 explorers" in text
    assert "s an iteration on 8 × here: explore" in text
    assert "ESTIMATES none" in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--explorers", "0"], "fleet.explorers.count in --explorers is 0; it must be at least 1."),
        (["--regenerators", "-2"], "fleet.regenerators.count in --regenerators is -2; it must be at least 1."),
        (["--learners", "0"], "learner.world_size in --learners is 0; it must be at least 1."),
        (["--gpu", "nothere.yaml"], "gpu is 'nothere.yaml' (--gpu or the cluster's file); it must be one of b200, h"),
        (["--cluster", "nothere.yaml"], "The file nothere.yaml cannot be read: [Errno 2] No such file"),
    ],
)
def test_a_plan_of_a_fleet_or_cluster_that_cannot_be_is_refused_before_it_is_printed(
    arguments: list[str], problem: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, "plan", config, *arguments).startswith(problem)


def test_what_an_evaluation_cannot_be_asked_for_is_refused_by_its_option(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tmp_path / "runs" / "small", config)
    for option, value, problem in (
        ("--solver", "heun", """rollout.solver in --solver is "heun"; it must be one of 'euler' or 'dpm2'."""),
        ("--samples", "0", "evaluation.samples in --samples is 0; it must be at least 1."),
    ):
        assert refusal(capsys, "eval", tmp_path / "runs" / "small", option, value) == problem


def test_options_may_stand_before_and_after_files(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = tmp_path / "more.yaml"
    more.write_text("run: {iterations: 7}")
    for arguments in (
        ["--set", "run.seed=5", config, more],
        [config, more, "--set", "run.seed=5"],
    ):
        assert solrl("plan", *arguments) == 0
        assert "7 iterations, one policy update each · seed 5" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--set", "rollout.pol=3"], "Unknown key rollout.pol in --set; did you mean rollout.pool?"),
        (["--set", "rollout.pool=x"], 'rollout.pool in --set is "x"; it must be a whole number.'),
        (
            ["--set", "rollout.keep=10"],
            "rollout.keep is 10 (--set); it must be at most rollout.pool, which is 8.",
        ),
        (
            ["--set", "rollout.preview.precision=bf16"],
            'rollout.preview.precision is "bf16" (--set); it must be a quantised tier such as nvfp4-emulated, or',
        ),
        (["--set", "fleet.learners.count=2"], "Unknown key fleet.learners.count in --set; did you mean learner.w"),
        (["--set", "rollout.keep=3"], "rollout.keep is 3 (--set); it must be even"),
        (["--set", "rollout.pool=9"], "rollout.preview.micro_batch is 8 ("),
        (["--set", "rollout.prompts=4"], "rollout.prompts is 4 (--set); it must be at most 3, the number of"),
        (
            ["--set", "evaluation.prompts=3"],
            "evaluation.prompts is 3 (--set); it must be at most 2, the number of",
        ),
        (["--set", "model.path=./nowhere"], "model.path (--set) is './nowhere'"),
        (["--set", "rewards.0.path=./nowhere"], "rewards.0.path"),
        (["--set", "rewards.0.path=."], "rewards.0.path (--set) is"),
        (
            ["--set", "rewards.0.kind=clip"],
            "rewards.0.kind (--set) is 'clip', which is neither a registered reward (aesthetic, clipscore",
        ),
        (
            ["--set", "rewards.0={kind: 'no_module:f'}"],
            "rewards.0.kind (--set) is 'no_module:f', but the module",
        ),
        (
            ["--set", "evaluation.reference=math:no"],
            "evaluation.reference (--set) is 'math:no', but math has no",
        ),
        (
            ["--set", "rollout.preview.precision=fp8"],
            "rollout.preview.precision is 'fp8' (--set): fp8 needs a card of compute",
        ),
        (["--set", "model.quantization.min_features=9999"], "model.quantization leaves no linear"),
        (["--set", "model.lora.targets=[to_x]"], "model.lora.targets (--set) names 'to_x', but no linear of"),
        (["--set", "checkpoints.min_free_gb=1e9"], "run.root is "),
        (["--set", "run.root=/proc/x"], "run.root is /proc/x (--set), but /proc takes no files."),
        (["--wrong"], "Unrecognized arguments: --wrong; see solrl --help."),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    arguments: list[str], problem: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, "train", config, *arguments).startswith(problem)
    assert not (config.parent / "runs").exists()


@pytest.mark.parametrize("content", [None, "", "\n  \n"])
def test_a_prompt_file_that_is_missing_or_empty_is_refused(
    content: str | None, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_text(content)
    assert str(file) in refusal(capsys, "train", config, "--set", f"prompts.train={file}")


def test_held_out_prompts_must_not_be_trained_on(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "heldout.txt").write_text("a red cross\na blue cross\n")
    message = refusal(capsys, "plan", config)
    assert "1 of its prompts are also in prompts.train, such as 'a blue cross'" in message


def test_commands_without_what_they_need_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys).startswith("The following arguments are required: COMMAND")
    assert refusal(capsys, "plan").startswith("No configuration file was given")
    assert refusal(capsys, "train", "--resume").startswith("--resume needs a run folder or the run's configuration")
    assert refusal(capsys, "report", tmp_path) == f"{tmp_path} is not a run folder: it has no config.yaml."
    assert refusal(capsys, "train", "--resume", tmp_path) == f"{tmp_path} is not a run folder: it has no config.yaml."


def test_a_run_is_resumed_by_its_folder_or_by_its_configuration(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tmp_path / "runs" / "small", config, "run.seed=9")
    assert solrl("train", "--dry-run", "--resume", tmp_path / "runs" / "small") == 0
    assert "seed 9" in capsys.readouterr().out
    assert solrl("train", config, "--set", "run.seed=9", "--resume", "--dry-run") == 0
    assert "seed 9" in capsys.readouterr().out
    assert refusal(capsys, "train", config, "--resume", "--dry-run").startswith(
        "run.seed is 42 (default), but the run in"
    )


def test_a_run_folder_may_be_moved_and_its_fleet_changed(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tmp_path / "runs" / "small", config)
    (tmp_path / "runs" / "small").rename(tmp_path / "elsewhere")
    more = ["--set", "fleet.explorers.count=5", "--set", "run.iterations=30"]
    assert solrl("train", "--dry-run", "--resume", tmp_path / "elsewhere", *more) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "elsewhere · 30 iterations" in text
    assert "5 explorers × 1 thread" in text


def refused_folder(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line that a run whose folder is refused prints after its arithmetic."""
    assert solrl("train", *arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    return message.removeprefix("error: ").strip()


def test_a_run_into_a_folder_in_use_is_refused_with_and_without_resume(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "RESUME_PATIENCE", 0.3)
    path = tmp_path / "runs" / "small"
    begin(path, config)
    before = (path / "config.yaml").read_bytes()
    holder = RunFolder(path)
    holder.lock(seconds=0)
    in_use = f"the run folder {path} is in use by process {os.getpid()} on {os.uname().nodename}"
    assert refused_folder(capsys, config) == in_use
    assert refused_folder(capsys, "--resume", path, "--set", "run.iterations=9") == in_use
    assert (path / "config.yaml").read_bytes() == before
    holder.unlock()


def test_a_second_run_and_a_shorter_one_are_refused_where_one_was_trained(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs" / "small"
    begin(path, config)
    (path / "checkpoints" / "iteration-000002").mkdir(parents=True)
    assert refused_folder(capsys, config).startswith(f"run.name is 'small', but {path} already holds a run")
    assert refused_folder(capsys, "--resume", path, "--set", "run.iterations=1").startswith(
        f"run.iterations is 1, but {path} has made 2 updates already; it must be at least 2"
    )


def test_a_resumed_run_may_be_in_any_folder(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "it's here: \U0001f5bf" / 'the "small" one'
    begin(path, config)
    assert solrl("train", "--dry-run", "--resume", path) == 0
    assert f"{path.name} · 3 iterations" in capsys.readouterr().out


def test_a_run_folder_that_cannot_be_made_is_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "small").write_text("a file")
    assert refused_folder(capsys, config) == (
        f"the run folder {tmp_path / 'runs' / 'small'} cannot be written: it is a file ({tmp_path / 'runs' / 'small'})"
    )


def test_a_misspelt_key_is_told_without_loading_the_libraries() -> None:
    code = "import sys, solrl_ray.cli; sys.exit(not {'torch', 'ray', 'diffusers'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_foreign_package_called_actors_is_refused(config: Path, tmp_path: Path) -> None:
    (tmp_path / "actors").mkdir()
    (tmp_path / "actors" / "__init__.py").write_text("")
    ours = str(Path(solrl_ray.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "solrl_ray", "train", str(config)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ours},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"error: The package 'actors' was imported from {tmp_path / 'actors'}, but" in done.stderr


def test_a_run_is_submitted_with_files_of_this_folder_and_to_a_disk_that_stays(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    url = ("--address", "http://127.0.0.1:1")
    assert refusal(capsys, "submit", config, *url).startswith(f"The configuration file {config} is outside of {here}")
    monkeypatch.chdir(tmp_path)
    assert refusal(capsys, "submit", config, *url, "--set", "run.root=runs").startswith(
        "run.root is 'runs' (--set); it must be an absolute path"
    )
    assert refusal(capsys, "submit", "--resume", "runs/small", *url).startswith("--resume is runs/small; a submitted")
    assert refusal(capsys, "submit", config).startswith("--address is missing")
    assert refusal(capsys, "submit", config, "--address", "head:6379").startswith("--address is 'head:6379'; it must")


def test_the_status_of_a_run_that_nobody_works_on_is_what_its_folder_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert solrl("status", made_runs.write_run(tmp_path / "ended")) == 0
    shown = capsys.readouterr().out
    assert "iteration 3 of 3   done" in shown
    assert "elapsed 0:36" in shown  # 36.5 s, as in its summary
    assert solrl("status", made_runs.write_run(tmp_path / "open", done=2, finished=False)) == 0
    shown = capsys.readouterr().out
    assert "iteration 3 of 3   not running; --resume goes on with it" in shown
    assert "0.300 → 0.310" in shown
    assert "elapsed 0:24" in shown  # two iterations of 10 s and three evaluations of 1.5 s: 24.5 s
    longer = made_runs.write_run(tmp_path / "longer")
    (longer / "config.yaml").write_text(to_yaml(made_runs.config(iterations=5)))  # as a resumed run does
    assert solrl("status", longer) == 0
    assert "iteration 4 of 5   not running; --resume goes on with it" in capsys.readouterr().out
    assert refusal(capsys, "status", tmp_path).startswith(f"{tmp_path} is not the folder of a run")
    assert refusal(capsys, "status").startswith("No live run is known; name a run folder")


def test_pools_are_scaled_of_runs_that_are_live(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = made_runs.write_run(tmp_path / "ended")
    for run, problem in (
        ([], "No live run is known; name the folder of a live run"),
        ([ended], f"The run in {ended} is not live; name the folder of a live run"),
        ([tmp_path], f"{tmp_path} is not a run folder: it has no config.yaml."),
    ):
        assert refusal(capsys, "pool", "scale", *run, "--explorers", "2").startswith(problem)
    for given in ("l40s", "l40s=", "=2", "l40s=-1"):
        assert refusal(capsys, "pool", "scale", "--explorers-of", given) == (
            f"--explorers-of is {given}; it must be a name and a number, such as l40s=4."
        )


def test_a_cluster_where_nobody_listens_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:  # so that nobody else takes the port; it does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        assert solrl("status", "--address", address) == 1
    refused = f"error: the Ray cluster at {address} could not be joined: [Errno 111] Connection refused\n"
    assert capsys.readouterr().err == refused


def test_a_dashboard_is_no_address_to_join(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "status", "--address", "http://head:8265") == (
        "--address or RAY_ADDRESS is 'http://head:8265', a dashboard, which is for solrl submit; "
        "it must be the Ray cluster's, such as head:6379."
    )


def test_a_trace_is_written_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_runs.write_run(tmp_path / "ended")
    assert refusal(capsys, "trace", run).startswith(f"{run} has no spans.jsonl")
    writer = SpanWriter(run)
    writer.write(Span(kind="stage", name="learning", stage="learn", iteration=0, started=5.0, seconds=2.0))
    writer.close()
    assert solrl("trace", run, "--out", tmp_path / "there.json") == 0
    assert str(tmp_path / "there.json") in capsys.readouterr().out
    events = json.loads((tmp_path / "there.json").read_text())["traceEvents"]
    assert [event["dur"] for event in events if event["ph"] == "X"] == [2e6]
    assert refusal(capsys, "trace", run, "--out", tmp_path) == f"--out is {tmp_path}, a folder; it must be a file."
    for out, problem in (
        (tmp_path / "there.json" / "in.json", f"{tmp_path}/there.json: it is a file"),
        (Path("/proc/x.json"), "/proc/x.json: its folder takes no files, or is gone"),
        (Path("/proc/x/y.json"), "/proc/x: its folder takes no files, or is gone"),
        (tmp_path / ("x" * 300), f"{tmp_path / ('x' * 300)}: File name too long"),
    ):
        assert solrl("trace", run, "--out", out) == 1
        assert capsys.readouterr().err == f"error: {problem}\n"
    assert refusal(capsys, "trace", run, "--out", "/dev/null") == "--out is /dev/null, a device; it must be a file."


def test_continue_begins_a_run_and_resumes_one_that_was_begun(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert solrl("train", config, "--continue", "--dry-run") == 0
    begin(tmp_path / "runs" / "small", config, "run.seed=9")
    assert solrl("train", config, "--continue", "--dry-run") == 0  # nothing was journaled: it is no run yet
    (tmp_path / "runs" / "small" / "journal").mkdir()
    (tmp_path / "runs" / "small" / "journal" / "iteration-000000.jsonl").touch()
    capsys.readouterr()
    assert refusal(capsys, "train", config, "--dry-run").startswith("run.name is 'small', but")
    assert refusal(capsys, "train", config, "--continue", "--dry-run").startswith("run.seed is 42 (default), but the")


def test_who_stops_reading_ends_a_command_without_a_word(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert solrl("plan", config) == 141
    assert capsys.readouterr().err == ""


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

"""What is wrong with a command is told before anything is imported, printed or started."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from solrl_ray.cli import preflight
from solrl_ray.common import progress_note, ray_auth
from solrl_ray.config.loading import load
from solrl_ray.errors import RunError
from tests.support.command_line import begin, printed, solrl
from tests.support.http_server import Quiet, listening
from tests.support.patience import patience
from tests.support.sentences import names


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "wandb", None)


def sentence(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line that is printed, whoever has to mend it."""
    assert solrl(*arguments) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("error: ").strip()


@pytest.mark.parametrize(
    ("arguments", "key", "values"),
    [
        (["--set", "run.init=nowhere"], "run.init", "'nowhere'"),
        (["--from", "./nowhere"], "run.init", "'./nowhere'"),
        (["--set", "run.root=/proc/runs"], "run.root", "/proc/runs"),
        (["--set", "run.root=/dev/null"], "run.root", "/dev/null"),
        (["--set", "fleet.learners.num_gpus=1"], "fleet.learners.num_gpus", "1 --address"),
        (["--set", "tracking.trackers=[mlflow]"], "tracking.trackers.0", '"mlflow" wandb'),
        (["--set", "tracking.trackers=wandb"], "tracking.trackers", '"wandb" list'),
        (["--set", "tracking.trackers=[wandb]"], "tracking.trackers", "wandb pip"),
        (["one_gpu"], "fleet.explorers.num_gpus", "1 one_gpu.yaml"),
        (["--address", "http://head:8265"], "--address", "'http://head:8265'"),
        (["--address", "head"], "--address", "'head' head:6379"),
        (["--address", "head:ray"], "--address", "'head:ray' head:6379"),
    ],
)
def test_what_cannot_begin_here_is_told_before_the_plan(
    arguments: list[str], key: str, values: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert names(sentence(capsys, "train", config_file, *arguments), key, values)


PROMPTS = {"prompts": 1, "digest": "0"}


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("metrics.jsonl", '{"event": "iteration", "iteration": 0, "crc32c": 1}\n', "metrics.jsonl, line 1"),
        ("metrics.jsonl", '{"event": "iter\n', "metrics.jsonl, line 1"),
        ("starts.json", '[{"when": ', "starts.json"),
        ("prompts.json", "[]", "prompts.json"),
        ("prompts.json", json.dumps({"train": PROMPTS, "heldout": PROMPTS}), "prompts.train is "),
        ("checkpoints/iteration-000004/state.json", "{}", "run.iterations is 3"),
    ],
)
def test_a_run_that_cannot_be_resumed_as_it_is_is_told_before_the_plan(
    name: str, content: str, problem: str, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "small"
    begin(folder, config_file)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content.encode("latin-1"))
    assert problem in sentence(capsys, "train", "--resume", folder, "--dry-run")
    assert (folder / name).read_bytes() == content.encode("latin-1")


def test_all_that_is_wrong_with_the_prompts_is_told_at_once(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = sentence(capsys, "train", config_file, "--set", "rollout.prompts=4")
    wrong = re.findall(r"(\S+) is (\d) \(--set\); it must be at most (\d)", said)
    assert wrong == [("rollout.prompts", "4", "3")]
    assert str(tmp_path / "train.txt") in said
    assert said.endswith("add --set rollout.prompts=3.")
    collapse = ("--set", "run.on_collapse=stop", "--set", "run.iterations=2", "--set", "evaluation.every=1")
    (tmp_path / "heldout.txt").write_text("a single one\n")
    said = sentence(capsys, "train", config_file, "--set", "rollout.prompts=4", *collapse)
    assert "rollout.prompts is 4" in said
    assert 'run.on_collapse is "stop" (--set); it must be warn' in said
    (tmp_path / "train.txt").unlink()
    said = sentence(capsys, "train", config_file, *collapse)
    assert f"{tmp_path}/train.txt cannot be read" in said
    assert "run.on_collapse" in said


def test_fewer_held_out_prompts_than_an_evaluation_takes_are_a_note(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = printed(capsys, "plan", config_file, "--set", "evaluation={prompts: 5, pictures: 9, samples: 3}")
    assert "note: prompts.heldout has 2 distinct prompts: evaluations use all of them (evaluation.prompts is 5)" in said
    assert "2 prompts × 3 samples" in said
    assert "= 6 images" in said


def test_a_slow_check_tells_what_it_does(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(run: preflight.Run) -> None:
        with progress_note.progress_note("counting 3 of 5 prompts"):
            time.sleep(0.2)

    monkeypatch.setattr(preflight, "TOLD_SECONDS", 0.02)
    monkeypatch.setattr(preflight, "CHECKS", ((slow, "files"),))
    preflight.check(preflight.Run(load([config_file])), "files")
    told = capsys.readouterr().out.splitlines()
    assert len(told) > 2
    assert set(told) == {"counting 3 of 5 prompts …"}


@pytest.mark.parametrize(
    "command", [("plan", "{config}", "--set", "prompts.train={file}"), ("prompts", "import", "{file}", "--out", "o")]
)
def test_a_command_that_reads_many_prompts_says_so_meanwhile(
    command: tuple[str, ...],
    config_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some tenths of a second, in which others are told every hundredth."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "TOLD_SECONDS", 0.01)
    many = tmp_path / "many.txt"
    many.write_text("".join(f"{number} red circles\n" for number in range(50_000)))
    assert solrl(*(word.format(config=config_file, file=many) for word in command)) == 0
    assert f"reading {many} …\n" in capsys.readouterr().out


def test_an_address_at_which_nobody_listens_is_told_before_the_plan(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    assert sentence(capsys, "train", config_file, "--address", address, "--dry-run").startswith(
        f"the Ray cluster at {address} could not be joined: "
    )


def test_only_nodes_of_this_user_make_a_cluster_known(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import time; print(flush=True); time.sleep(60)"
    command = ["/opt/raylet", "-c", code, "--gcs-address=10.0.0.9:6379"]
    with subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        node.stdout.readline()
        assert "10.0.0.9:6379" in ray_auth.clusters_here()
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert ray_auth.clusters_here() == []
        node.kill()


TOKEN = "right"


class Server(Quiet):
    def do_GET(self) -> None:
        self.send_response(200 if self.headers.get("Authorization") == f"Bearer {TOKEN}" else 401)
        self.end_headers()


@pytest.fixture
def url() -> Iterator[str]:
    with listening(Server) as address:
        yield address


@pytest.fixture
def cluster() -> Iterator[str]:
    """Address of who asks for a token as a Ray cluster does."""

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        if dict(context.invocation_metadata()).get("authorization") != f"Bearer {TOKEN}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken: Authentication token is missing or wrong")
        return b""

    service, _, method = ray_auth.ALIVE[1:].partition("/")
    handlers = grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(answer)})
    server = grpc.server(ThreadPoolExecutor(1), handlers=(handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.parametrize(
    "command", [["train", "CONFIG"], ["plan", "CONFIG"], ["status"], ["pool", "scale"]], ids=" ".join
)
def test_a_token_that_a_cluster_refuses_is_told_as_what_it_is(
    command: list[str],
    cluster: str,
    config_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    arguments = [str(config_file) if argument == "CONFIG" else argument for argument in command]
    began = time.monotonic()
    said = sentence(capsys, *arguments, "--address", cluster)
    assert time.monotonic() - began < patience(5.0)
    assert names(said, f"the Ray cluster at {cluster}", "refuses token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    ray_auth.check_access(cluster, seconds=5.0)


def test_who_listens_and_does_not_answer_is_told_as_that() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(RunError, match=f"^the Ray cluster at {address} could not be joined: the server there did "):
            ray_auth.check_access(address, seconds=1.5, answer_seconds=0.2)


def test_the_address_of_another_server_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = url.removeprefix("http://")  # such as the dashboard's
    began = time.monotonic()
    with pytest.raises(RunError, match=f"^the Ray cluster at {address} could not be joined: .* is not a Ray head"):
        ray_auth.cluster_at(address)
    assert time.monotonic() - began < patience(5.0)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    ray_auth.check_access(address, seconds=5.0)  # only Ray could tell

"""What is said of a submitted job that has ended, by a Job server that speaks Ray's HTTP and goes down at will."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.job_submission import JobSubmissionClient

from actors.client import submit
from solrl_ray.errors import UserError
from tests.support.http_server import Quiet, listening

JOB = {"type": "SUBMISSION", "submission_id": "small-1", "status": "FAILED", "entrypoint": "python", "message": "gone"}


class Server:
    def __init__(self) -> None:
        self.url = ""
        self.answers = {"/api/version": [{"ray_version": ray.__version__}] * 2, "/api/jobs/small-1": [JOB]}
        """What is answered, once each; then the connection ends without an answer."""
        self.refusals: list[str] = []
        """Why jobs are not taken, once each."""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()

    class Handler(Quiet):
        def do_GET(self) -> None:
            if left := made.answers.get(self.path):
                self.answer(json.dumps(left.pop()).encode())

        def do_POST(self) -> None:
            self.read()
            if made.refusals:
                self.answer(made.refusals.pop(0).encode(), 500)
            else:
                self.answer(json.dumps({"job_id": None, "submission_id": "small-1"}).encode())

    with listening(Handler) as made.url:
        yield made


@pytest.fixture
def client(server: Server) -> JobSubmissionClient:
    return JobSubmissionClient(server.url)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in (("train.txt", 10), ("my data/a.bin", 70_000_000), ("b.bin", 60_000_000), ("runs/c.bin", 99)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    return tmp_path


def test_a_folder_that_is_too_large_for_a_job_server_is_told_with_its_largest_parts(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"has 130 MB, .* takes 105 MB; .* are my data \(70 MB\), b.bin \(60 MB\), train"
    ):
        submit.check_upload(folder, ["/runs/"], ["train.txt"])
    (folder / ".rayignore").write_text("*.bin\n")
    submit.check_upload(folder, ["/runs/"], ["train.txt", "sana_1600m"])  # the last is no file of this folder


@pytest.mark.parametrize("name", [".gitignore", ".rayignore"])
def test_a_file_that_the_job_reads_and_would_not_get_is_told(name: str, folder: Path) -> None:
    (folder / name).write_text("*.bin\n*.txt\n")
    with pytest.raises(UserError, match=r"train\.txt would not reach the job"):
        submit.check_upload(folder, [], ["./train.txt"])


@pytest.mark.parametrize(("answers", "why"), [(1, " (gone)"), (0, "")])
def test_after_a_failed_job_comes_its_reason_if_the_head_still_answers_and_how_to_go_on(
    answers: int,
    why: str,
    client: JobSubmissionClient,
    server: Server,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submit, "STREAM_RETRY_SECONDS", 0.01)
    server.answers["/api/jobs/small-1"] += [JOB] * answers
    assert submit._follow(client, "small-1", "solrl submit small --resume") == 1
    assert capsys.readouterr().out == f"job small-1 failed{why}; go on with: solrl submit small --resume\n"


def test_a_cluster_that_has_just_begun_is_asked_again_until_it_can_start_jobs(
    client: JobSubmissionClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "STREAM_RETRY_SECONDS", 0.01)
    server.refusals = ["No available agent to submit job, please try again later."] * 2
    submit._begin(client, entrypoint="python", submission_id="small-1")
    assert server.refusals == []


@pytest.mark.parametrize(
    ("refusal", "seconds"), [("No available agent to submit job, please try again later.", 0.0), ("out of disk", 60.0)]
)
def test_a_cluster_that_cannot_start_jobs_for_long_or_says_something_else_ends_it(
    client: JobSubmissionClient, server: Server, monkeypatch: pytest.MonkeyPatch, refusal: str, seconds: float
) -> None:
    monkeypatch.setattr(submit, "AGENT_SECONDS", seconds)
    server.refusals = [refusal] * 2
    with pytest.raises(RuntimeError, match=refusal.partition(",")[0]):
        submit._begin(client, entrypoint="python", submission_id="small-1")
    assert server.refusals == [refusal]

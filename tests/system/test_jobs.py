"""`ray job submit` to a real cluster, from a clean checkout, with token authentication."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from solrl_ray.config.loading import to_yaml
from solrl_ray.config.schema import Config
from solrl_ray.storage.run_folder import RunFolder
from tests.support.heads import BIN, Head, head
from tests.support.patience import patience, wait_until
from tests.support.small import digests, folder, small_config

REPOSITORY = Path(__file__).parents[2]
NO_AGENT = "No available agent to submit job"
"""Ray's error while no node of a cluster that has just started can start a job. The job is not submitted then."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the repository tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("a clean checkout needs git and the repository")
    for name in listed.stdout.split("\0")[:-1]:
        if (REPOSITORY / name).is_file():
            target = tmp_path / "checkout" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, target)
    return tmp_path / "checkout"


def call(checkout: Path, cluster: Head, *command: str | Path, status: int = 0, **variables: str) -> str:
    """What a command prints, given in the checkout by a user of the cluster."""
    deadline = time.monotonic() + patience(300.0)
    while True:
        done = subprocess.run(
            list(map(str, command)),
            cwd=checkout,
            env=cluster.environment | {"PYTHONPATH": "", "RAY_API_SERVER_ADDRESS": cluster.url} | variables,
            capture_output=True,
            text=True,
            timeout=patience(300.0),
            check=False,
        )
        said = done.stdout + done.stderr
        if NO_AGENT not in said or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert done.returncode == status, said
    return said


def submitting(*options: str) -> tuple[str, ...]:
    return (str(BIN / "ray"), "job", "submit", "--working-dir", ".", *options, "--")


def test_a_submitted_run_loses_its_cluster_and_is_resubmitted_to_the_same_bytes(
    calm: Config, forks: str, checkout: Path, tmp_path: Path
) -> None:
    config = small_config(tmp_path / "runs", "submitted", "fleet.placement=colocated")  # fewer processes that start
    run = folder(config)
    (checkout / "small.yaml").write_text(to_yaml(config))
    (checkout / "env.yaml").write_text(yaml.safe_dump({"py_executable": forks}))
    said = []

    def called(cluster: Head, *command: str | Path, status: int = 0, **variables: str) -> str:
        said.append(call(checkout, cluster, *command, status=status, **variables))
        return said[-1]

    with ExitStack() as clusters:
        with head(cpus=3, labels="role=head") as first, ThreadPoolExecutor() as aside:
            assert first.status_of("/api/jobs/", None) == 401
            place = ("--entrypoint-num-cpus", "1", "--entrypoint-label-selector", json.dumps({"role": "head"}))
            submit = submitting("--no-wait", "--submission-id", "submitted-1", *place)
            called(first, *submit, "solrl", "train", "small.yaml")
            assert [job["submission_id"] for job in first.jobs()] == ["submitted-1"]
            # While its workers start as users' do: those of the jobs to come are forks.
            coming = aside.submit(clusters.enter_context, head(variables={"RAY_prestart_worker_first_driver": "0"}))
            second = coming.result(patience(300.0))
            wait_until("iteration 1", (run / "journal" / "iteration-000001.jsonl").exists)
            wait_until("a checkpoint", RunFolder(run).checkpoint(1).exists)
        assert not (run / "summary.json").exists()

        again = submitting("--runtime-env", "env.yaml", "--submission-id", "submitted-2")
        finished = called(second, *again, "solrl", "train", "--resume", run)
        assert "iteration 3/3" in finished
        assert "Job 'submitted-2' succeeded" in finished
    assert digests(config) == digests(calm)

    tokens = (first.token, second.token)
    assert not any(token in text for token in tokens for text in said)
    files = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert not any(token.encode() in content for token in tokens for content in files)


def test_a_job_gets_the_folder_without_runs_and_environments_and_must_not_keep_its_run_there(
    forked_workers: None, checkout: Path
) -> None:
    for name in ("runs/demo/big.bin", ".venv/bin/python", ".venv-gpu/bin/python", "prompts/train.txt"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("x")
    with head() as cluster:
        seen = call(checkout, cluster, *submitting(), "ls", "-A").splitlines()
        assert {"configs", "solrl_ray", ".rayignore"} <= {*seen}
        assert not {"runs", ".venv", ".venv-gpu", "prompts"} & {*seen}
        # With prompts in a folder that .gitignore names.
        seen = call(checkout, cluster, *submitting(), "ls", "-A", RAY_RUNTIME_ENV_IGNORE_GITIGNORE="1").splitlines()
        assert "prompts" in seen
        assert not {"runs", ".venv", ".venv-gpu"} & {*seen}
        refused = call(checkout, cluster, *submitting(), "solrl", "train", "demo", "--continue", status=1)
        assert "error: run.root is runs (" in refused
        assert "in the folder of a Ray job" in refused

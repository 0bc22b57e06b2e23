"""A run submitted to a real cluster's Job server, from a clean checkout, with token authentication."""

from __future__ import annotations

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from solrl_ray.config.loading import to_yaml
from solrl_ray.config.schema import Config
from solrl_ray.storage.run_folder import RunFolder
from tests.support.heads import BIN, Head, head
from tests.support.patience import patience, wait_until
from tests.support.small import digests, folder, small_config

REPOSITORY = Path(__file__).parents[2]


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
    done = subprocess.run(
        list(map(str, command)),
        cwd=checkout,
        env=cluster.environment | {"PYTHONPATH": "", "RAY_API_SERVER_ADDRESS": cluster.url} | variables,
        capture_output=True,
        text=True,
        timeout=patience(300.0),
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def submitting(forks: str, job: str) -> tuple[str, ...]:
    """``ray job submit`` with workers that are forks."""
    given = ("--runtime-env-json", json.dumps({"py_executable": forks}), "--submission-id", job)
    return (str(BIN / "ray"), "job", "submit", "--working-dir", ".", *given)


def test_a_submitted_run_loses_its_cluster_and_is_resubmitted_to_the_same_bytes(
    calm: Config, forks: str, checkout: Path, tmp_path: Path
) -> None:
    config = small_config(tmp_path / "runs", "submitted", "fleet.placement=colocated")  # fewer processes that start
    run = folder(config)
    (checkout / "small.yaml").write_text(to_yaml(config))
    said = []

    def called(cluster: Head, *command: str | Path, status: int = 0, **variables: str) -> str:
        said.append(call(checkout, cluster, *command, status=status, **variables))
        return said[-1]

    with ExitStack() as clusters:
        with head() as first, ThreadPoolExecutor() as aside:
            assert first.status_of("/api/jobs/", None) == 401
            submit = (BIN / "python", "-m", "solrl_ray", "submit", "small.yaml", "--address", first.url, "--no-wait")
            assert "submitted-1" in called(first, *submit)
            # While its workers start as users' do: those of the jobs to come are forks.
            coming = aside.submit(clusters.enter_context, head(variables={"RAY_prestart_worker_first_driver": "0"}))
            refused = called(first, *submit, status=1, RAY_AUTH_TOKEN="another")
            assert refused.startswith(f"error: the Job server at {first.url} cannot be used: "), refused
            assert "Traceback" not in refused
            second = coming.result(patience(300.0))
            wait_until("iteration 1", (run / "journal" / "iteration-000001.jsonl").exists)
            wait_until("a checkpoint", RunFolder(run).checkpoint(1).exists)
        assert not (run / "summary.json").exists()

        resume = ("--", "python", "-m", "solrl_ray", "train", "--resume", run, "--no-live")
        finished = called(second, *submitting(forks, "again"), *resume)
        assert "iteration 3/3" in finished
    assert digests(config) == digests(calm)

    tokens = (first.token, second.token)
    assert not any(token in text for token in tokens for text in said)
    files = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert not any(token.encode() in content for token in tokens for content in files)

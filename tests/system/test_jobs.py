"""A run submitted to a real cluster's Job server, from a clean checkout, with token authentication."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from solrl_ray.config.loading import to_yaml
from solrl_ray.config.schema import Config
from tests.heads import BIN, PATIENCE, Head, head, wait_until
from tests.small import digests, folder, small_config

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


@pytest.mark.timeout(1800)  # three jobs, each with the start of a run
@pytest.mark.faults
def test_a_submitted_run_loses_its_cluster_is_stopped_and_resubmitted_to_the_same_bytes(
    calm: Config, checkout: Path, tmp_path: Path
) -> None:
    config = small_config(tmp_path / "runs", "submitted")
    run = folder(config)
    (checkout / "small.yaml").write_text(to_yaml(config))
    said = []

    def call(cluster: Head, *command: str | Path, status: int = 0, **variables: str) -> str:
        done = subprocess.run(
            list(map(str, command)),
            cwd=checkout,
            env=cluster.environment | {"PYTHONPATH": "", "RAY_API_SERVER_ADDRESS": cluster.url} | variables,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        said.append(done.stdout + done.stderr)
        assert done.returncode == status, said[-1]
        return said[-1]

    jobs = (BIN / "ray", "job")
    with head() as first:
        submit = (BIN / "python", "-m", "solrl_ray", "submit", "small.yaml", "--address", first.url, "--no-wait")
        assert first.status_of("/api/jobs/", None) == 401
        refused = call(first, *submit, status=1, RAY_AUTH_TOKEN="another")
        assert refused.startswith(f"error: the Job server at {first.url} cannot be used: "), refused
        assert "Traceback" not in refused
        assert "submitted-1" in call(first, *submit)
        wait_until("iteration 1", (run / "journal" / "iteration-000001.jsonl").exists)
    assert not (run / "summary.json").exists()

    train = ("--working-dir", ".", "--", "python", "-m", "solrl_ray", "train", "--resume", run, "--no-live")
    with head() as second:
        call(second, *jobs, "submit", "--no-wait", "--submission-id", "again", *train)
        wait_until("iteration 2", (run / "journal" / "iteration-000002.jsonl").exists)
        call(second, *jobs, "stop", "again")
        assert not (run / "summary.json").exists()
        assert "iteration 2/3" in call(second, *jobs, "logs", "again")
        assert "iteration 3/3" in call(second, *jobs, "submit", *train)
    assert digests(config) == digests(calm)

    tokens = (first.token, second.token)
    assert not any(token in text for token in tokens for text in said)
    files = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert not any(token.encode() in content for token in tokens for content in files)

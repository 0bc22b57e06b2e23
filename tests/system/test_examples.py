"""The examples together, as a user has them: a folder of one's own, submitted to a cluster that has the package."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import yaml

from tests.support.examples import EXAMPLES, JUDGE, REWARD_SERVER, listening
from tests.support.heads import head
from tests.support.patience import patience
from tests.support.small import SIZES


def test_a_function_a_server_and_a_judge_score_a_submitted_run_with_prompts_of_its_own(
    forked_workers: None, tmp_path: Path
) -> None:
    here, runs = tmp_path / "here", tmp_path / "runs"
    shutil.copytree(EXAMPLES, here / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    with (
        head(variables={"PYTHONPATH": str(EXAMPLES.parent)}) as cluster,
        listening(REWARD_SERVER) as served,
        listening(JUDGE) as judged,
    ):
        variables = {"PYTHONPATH": str(EXAMPLES.parent), "RUNS": str(runs)}

        def call(*command: str, status: int = 0) -> str:
            done = subprocess.run(
                command,
                cwd=here,
                env=cluster.environment | variables,
                capture_output=True,
                text=True,
                timeout=patience(300.0),
                check=False,
            )
            assert done.returncode == status, done.stdout + done.stderr
            return done.stdout + done.stderr

        [remote] = yaml.safe_load(REWARD_SERVER.with_name("reward.yaml").read_text())["rewards"]
        remote["remote"]["url"] = f"http://127.0.0.1:{served}/score"
        [judge] = yaml.safe_load(JUDGE.with_name("judge.yaml").read_text())["rewards"]
        judge["judge"]["url"] = f"http://127.0.0.1:{judged}/v1"
        own = {"kind": "examples/own_reward/my_rewards.py:redder"}
        (here / "mine.yaml").write_text(yaml.safe_dump({"rewards": [own, remote, judge]}))

        captions = "examples/own_prompts/captions.csv"
        call("solrl", "prompts", "import", captions, "--column", "caption", "--heldout", "8", "--out", "prompts")
        sizes = [word for size in (*SIZES, "run.iterations=1") for word in ("--set", size)]
        parts = ("demo", "examples/own_prompts/prompts.yaml", "mine.yaml")
        said = call("examples/submit/submit.sh", cluster.url, *parts, *sizes)
        # Who asks about it is not listed as another job.
        asked = call("solrl", "status", "--address", cluster.address, status=2)
        assert [job["type"] for job in cluster.jobs()] == ["SUBMISSION"]
    assert "' succeeded" in said
    assert cluster.address in asked
    assert cluster.token not in said + asked
    summary = json.loads((runs / "demo" / "summary.json").read_text())
    assert summary["lora_digest"]
    assert summary["reward_costs"]["requests"] > 0
    [code] = (runs / "demo" / "code").iterdir()
    assert (code / "my_rewards.py").read_text() == (EXAMPLES / "own_reward" / "my_rewards.py").read_text()

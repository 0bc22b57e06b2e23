"""``solrl eval`` on a finished run: the same scores as the run measured itself, and any other reward beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from solrl_ray.cli import main
from solrl_ray.config.schema import Config
from tests.small import folder

pytestmark = pytest.mark.usefixtures("local_ray")


def test_an_evaluation_alone_repeats_the_runs_own_and_adds_a_column(calm: Config, tmp_path: Path) -> None:
    (tmp_path / "clip.yaml").write_text("rewards: [{kind: clipscore, path: 'builtin:testbed/reward'}]")
    (tmp_path / "more.yaml").write_text("rewards: [{kind: 'tests.system.rewards:brightness', weight: 3.0}]")
    files = [str(tmp_path / name) for name in ("clip.yaml", "more.yaml")]
    out = tmp_path / "out"
    before = sorted(path for path in folder(calm).rglob("*") if "embeddings" not in path.parts)
    arguments = ["--policies", "base,lora,ema", "--rewards", *files, "--out", str(out), "--no-live"]
    assert main(["eval", str(folder(calm)), *arguments]) == 0
    found = json.loads((out / "evaluation.json").read_text())
    assert (found["policies"], found["updates"]) == (["base", "lora", "ema"], 3)
    assert found["rewards"] == ["clipscore", "tests.system.rewards:brightness"]
    for policy, name in (("base", "updates-000000-base"), ("ema", "updates-000003-ema")):
        own = json.loads((folder(calm) / "evaluations" / f"{name}.json").read_text())["rewards"]
        assert found["scores"][policy]["clipscore"] == own
    bright = [value for v in found["scores"]["lora"]["tests.system.rewards:brightness"].values() for value in v]
    assert all(0 < value < 1 for value in bright)  # a column is the reward itself, without its weight
    assert len(list((out / "ema").glob("*.png"))) == 2
    assert "tests.system.rewards:brightness" in (out / "evaluation.txt").read_text()
    assert sorted(path for path in folder(calm).rglob("*") if "embeddings" not in path.parts) == before

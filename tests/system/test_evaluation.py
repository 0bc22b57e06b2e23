"""``solrl eval`` alone on a run folder: the scores that the oracle computes in one process, a column a reward."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from solrl_ray import models, rewards
from solrl_ray.cli import main
from solrl_ray.config.loading import to_yaml
from solrl_ray.config.schema import Config
from solrl_ray.learning.state import Tensors
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.storage.continuation import FORMAT
from solrl_ray.storage.run_folder import RunFolder
from solrl_ray.storage.warm_start import factor_shapes
from tests import oracle
from tests.support.made_checkpoints import small_state as state
from tests.support.small import small_config
from tests.system.rewards import brightness

pytestmark = pytest.mark.usefixtures("local_ray")


def factors(config: Config, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in factor_shapes(config).items()}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run folder with one checkpoint, whose policies differ."""
    given = "evaluation.prompts=2", "fleet.deadlines.start=900", "rollout.explore.precision=auto"
    config = small_config(tmp_path, "made", *given)
    run = RunFolder.of(config)
    run.path.mkdir(parents=True)
    (run.path / "format").write_text(f"{FORMAT}\n")
    (run.path / "config.yaml").write_text(to_yaml(config))
    parts = {name: factors(config, seed) for seed, name in enumerate(("default", "old", "ema", "exp_avg"))}
    replace(state(3), **parts, exp_avg_sq=factors(config, 9)).save(run.checkpoint(3))
    return config


def expected(config: Config, policy: Tensors) -> dict[str, dict[str, list[float]]]:
    """Reward → prompt id → scores at the fixed addresses."""
    base = models.load(config.model, "cpu", components={"text", "transformer", "vae"})
    prompts = read_prompts(config.prompts.heldout)[: config.evaluation.prompts]
    embeddings = oracle.embed(base, prompts)
    sampler = oracle.sampling_model(config, base, policy, False)
    stage = SimpleNamespace(steps=config.evaluation.steps, micro_batch=config.evaluation.samples)
    torch.set_num_threads(config.fleet.regenerators.threads)
    found: dict[str, dict[str, list[float]]] = {}
    for kind, score in (
        ("clipscore", rewards.load(config.rewards, "cpu").score),
        ("tests.system.rewards:brightness", brightness),
    ):
        found[kind] = {}
        for prompt in prompts:
            seeds = [
                oracle.address(config, "evaluation-noise", 0, (prompt.id, i)) for i in range(config.evaluation.samples)
            ]
            found[kind][prompt.id] = oracle.draw(
                config, stage, sampler, score, prompt.text, embeddings[prompt.id], seeds
            )[1]
    return found


def test_an_evaluation_alone_has_the_oracles_scores_for_every_policy_and_reward(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "clip.yaml").write_text("rewards: [{kind: clipscore, path: 'builtin:testbed/reward'}]")
    (tmp_path / "more.yaml").write_text("rewards: [{kind: 'tests.system.rewards:brightness', weight: 3.0}]")
    files = [str(tmp_path / name) for name in ("clip.yaml", "more.yaml")]
    run, out = RunFolder.of(config).path, tmp_path / "out"
    arguments = ["--policies", "base,default,ema", "--rewards", *files, "--out", str(out), "--no-live"]
    assert main(["eval", str(run), "--out", "/proc/out"]) == 1
    assert "/proc/out: its folder takes no files" in capsys.readouterr().err
    assert main(["eval", str(run), *arguments]) == 0
    found = json.loads((out / "evaluation.json").read_text())
    assert (found["policies"], found["updates"]) == (["base", "default", "ema"], 3)
    trained = factors(config, 0)
    base = {name: torch.zeros_like(f) if name.endswith("lora_B") else f for name, f in trained.items()}
    for policy, wanted in (("base", base), ("default", trained), ("ema", factors(config, 2))):
        assert found["scores"][policy] == expected(config, wanted), policy
    assert found["scores"]["default"] != found["scores"]["ema"]
    assert len(list((out / "ema").glob("*.png"))) == config.evaluation.samples  # of one prompt
    assert "tests.system.rewards:brightness" in (out / "evaluation.txt").read_text()
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml", "embeddings", "format"]

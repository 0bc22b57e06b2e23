"""Every model family trains in every rollout strategy with every method, in whole runs on tiny checkpoints.

The runs have no Ray: `one_process.py` lets the real controller call the workers' real classes. That the bytes are those
of a run on Ray is tested in `tests/system/test_one_process.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import one_process
import pytest

from solrl_ray.config.guidance import Cfg
from solrl_ray.config.loading import load
from solrl_ray.config.rewards import Frames
from solrl_ray.config.schema import Config
from solrl_ray.report.data import read_run
from tests.support.editing import with_prompts
from tests.support.families import BUILDERS, model_config
from tests.support.small import CONFIGS, folder, summary

SIZES = (
    "rollout={prompts: 2, pool: 4, keep: 2, solver: euler, accept_quantized_training: true}",
    "rollout.explore={steps: 3, micro_batch: 2}",
    "rollout.regenerate={steps: 3, micro_batch: 2}",
    "learner.micro_batch=2",
    "evaluation={prompts: 1, samples: 1, steps: 2, pictures: 0}",
    "rewards=[{kind: 'tests.system.rewards:brightness'}]",
    "fleet={explorers: {count: 1}, regenerators: {count: 1}, learners: {threads: 1}}",
)
STRATEGIES = {
    "direct": ("rollout.pool=2",),
    "quantized": (),
    "scaled": (),
    "two_stage": ("rollout.preview.prune={after: 1, keep: 2}", "rollout.explore.precision=nvfp4-emulated"),
}
METHODS = {
    "awm": ("objective.timesteps=2",),
    "dance_grpo": (),
    "diffusion_nft": (),
    "flow_grpo": (),
    "flow_grpo_fast": ("rollout.sampler.window={size: 1, range: [0, 2]}",),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: BUILDERS[family](tmp_path_factory.mktemp(family) / "pipeline"))


def test_no_strategy_or_method_is_left_out() -> None:
    assert {path.stem for path in (CONFIGS / "strategies").glob("*.yaml")} == set(STRATEGIES)
    others = {"diffusion_nft_paper", "sol_rl", "sol_rl_published"}  # other numbers, or with two_stage
    assert {path.stem for path in (CONFIGS / "methods").glob("*.yaml")} - others == set(METHODS)


def of_family(made: Config, family: str, checkpoint: Path, **changes: Any) -> Config:
    """A configuration with a family's tiny checkpoint; if it makes videos, the rewards score two frames."""
    schedule = {} if family.startswith("wan") else {"schedule": made.model.schedule}  # which has one of its own
    model = model_config(family, checkpoint, **schedule, **changes)
    made = made.model_copy(update={"model": model})
    if not model.frames:
        return made
    rewards = [reward.model_copy(update={"frames": Frames(count=2)}) for reward in made.rewards]
    evaluation = made.evaluation.model_copy(update={"reference": ""})  # the testbed's draws pictures
    return made.model_copy(update={"rewards": rewards, "evaluation": evaluation})


@pytest.mark.parametrize("family", BUILDERS)
def test_every_family_trains_and_is_evaluated_with_guidance(
    family: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """On-policy with guided velocities: the trained one must be that of the samples. Evaluations have another."""
    parts = [CONFIGS / "demo.yaml", CONFIGS / "methods/flow_grpo.yaml"]
    made = load(parts, [*SIZES, f"run={{root: '{tmp_path}', name: guided, iterations: 2}}"])
    evaluation = made.evaluation.model_copy(update={"cfg": Cfg(scale=5.0, interval=(0.1, 0.9))})
    made = made.model_copy(update={"evaluation": evaluation})
    config = with_prompts(of_family(made, family, folder_of(family), cfg=Cfg(scale=3.0)), tmp_path)
    one_process.train(one_process.checked(config))
    done = read_run(folder(config)).iterations
    assert [record.first_ratio_deviation for record in done] == [0.0, 0.0]
    assert all(record.gradient_norm > 0 and record.passes == record.expected_passes > 0 for record in done)
    assert all(record.differing_results == 0 for record in done)


def case(family: str, strategy: str, method: str) -> Any:
    """Every two of them meet in a test that is not slow."""
    usual = (family == "flux") + (strategy == "two_stage") + (method == "diffusion_nft")
    return pytest.param(family, strategy, method, marks=[] if usual else pytest.mark.slow)


@pytest.mark.parametrize(
    ("family", "strategy", "method"), [case(*each) for each in itertools.product(BUILDERS, STRATEGIES, METHODS)]
)
def test_every_family_strategy_and_method_trains(
    family: str, strategy: str, method: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    parts = [CONFIGS / "demo.yaml", CONFIGS / f"strategies/{strategy}.yaml", CONFIGS / f"methods/{method}.yaml"]
    own = (*STRATEGIES[strategy], *METHODS[method], f"run={{root: '{tmp_path}', name: run, iterations: 2}}")
    made = load(parts, [*SIZES, *own])
    config = with_prompts(of_family(made, family, folder_of(family)), tmp_path)
    one_process.train(one_process.checked(config))
    done = read_run(folder(config)).iterations
    assert len(done) == 2
    assert all(record.gradient_norm > 0 and record.passes == record.expected_passes > 0 for record in done)
    assert all(record.differing_results == 0 for record in done)
    assert {record.first_ratio_deviation for record in done} == ({None} if method == "diffusion_nft" else {0.0})
    assert summary(config)["lora_digest"]

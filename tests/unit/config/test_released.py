"""The methods' files beside what their authors released, read in their sources (commits in the comments)."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from solrl_ray.config.checks import check
from solrl_ray.config.loading import load
from solrl_ray.sampling.schedules import sigmas

CONFIGS = Path(__file__).parents[3] / "configs"
ADAM = "learner.optimizer.lr=3e-4 learner.optimizer.weight_decay=1e-4 learner.gradient_clip=1.0 "
RELEASED = {
    # yifan123/flow_grpo, config/grpo.py, `pickscore_sd3`
    "flow_grpo": ADAM + "rollout.sampler.noise_level=0.7 rollout.regenerate.steps=10 objective.clip_range=1e-4 "
    "objective.kl=0.01 objective.advantage.std=global learner.updates=2",
    # the same, `pickscore_sd3_fast_nocfg`
    "flow_grpo_fast": ADAM + "rollout.sampler.kind=cps rollout.sampler.noise_level=0.8 rollout.sampler.window.size=3 "
    "rollout.sampler.window.range=[0,5] rollout.regenerate.steps=10 objective.clip_range=1e-5 objective.kl=0.0 "
    "objective.advantage.std=global learner.updates=2",
    # XueZeyue/DanceGRPO, the script for FLUX with LoRA
    "dance_grpo": ADAM + "rollout.sampler.eta=0.3 rollout.sampler.shared_noise=true rollout.regenerate.steps=12 "
    "objective.clip_range=1e-4 objective.timestep_fraction=0.6 objective.advantage.std=group_unbiased "
    "objective.advantage.clip=5.0 learner.ema_cap=0.0 learner.updates=2",
    # scxue/advantage_weighted_matching 12b1397, config/dgx_awm.py, `pickscore_sd3_no_cfg_1node`
    "awm": ADAM + "rollout.regenerate.steps=14 objective.weighting=ghuber objective.power=0.25 objective.timesteps=6 "
    "objective.timestep_fraction=0.9 objective.skip_first=false objective.clip_range=1.0 objective.kl=1e-4 "
    "objective.anchor.weight=1.0 objective.anchor.slope=0.001 objective.anchor.cap=0.3 objective.advantage.std=global "
    "objective.advantage.clip=5.0 objective.advantage_max=1.0 learner.ema_cap=0.99 learner.updates=1",
    # NVlabs/Sana 06af561, the base configuration and its `sol_rl` family; NVlabs/DiffusionNFT 24af555, `sd3_pickscore`
    "sol_rl_published": "rollout.prompts=48 rollout.pool=96 rollout.keep=24 rollout.selection=best_worst "
    "rollout.explore.steps=6 rollout.regenerate.steps=10 objective.beta=1.0 objective.kl=1e-4 "
    "objective.advantage.std=global objective.advantage.clip=5.0 objective.old_decay.slope=0.001 "
    "objective.old_decay.cap=0.5 learner.ema_cap=0.9 learner.updates=1 learner.optimizer.lr=3e-4 "
    "learner.optimizer.weight_decay=1e-4 "
    "rollout.preview.prune=null rollout.explore.micro_batch=24 rollout.max_staleness=0 "
    "objective.old_decay.kind=linear learner.schedule.decay=none",
}
MODELS: dict[str, tuple[int, int, str, int]] = {
    "flux1_dev": (512, 128, "flux", 28),
    "sd35_large": (1024, 128, "shift", 40),
    "sana_1600m": (1024, 300, "linear", 40),
    "sd35_medium": (512, 128, "shift", 40),
}
"""Resolution, tokens of the text, grid, steps of an evaluation: NVlabs/Sana 06af561, NVlabs/DiffusionNFT 24af555."""


@pytest.mark.parametrize("method", RELEASED)
def test_a_method_has_the_released_settings(method: str) -> None:
    files, released = [CONFIGS / "demo.yaml", CONFIGS / "methods" / f"{method}.yaml"], RELEASED[method].split()
    keys = [setting.partition("=")[0] for setting in released]
    ours, theirs = ({key: config.value_of(key) for key in keys} for config in (load(files), load(files, released)))
    assert ours == theirs


@pytest.mark.parametrize("method", ["flow_grpo", "flow_grpo_fast"])
def test_the_moving_average_forgets_as_fast_as_the_released_one(method: str) -> None:
    cap = load([CONFIGS / "demo.yaml", CONFIGS / "methods" / f"{method}.yaml"]).learner.ema_cap
    assert cap**8 == pytest.approx(0.9, abs=0.002)  # released: 0.9 every eighth optimiser step


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_drawn_as_released(name: str) -> None:
    config = load([CONFIGS / "demo.yaml", CONFIGS / "models" / f"{name}.yaml"])
    model = config.model
    found = (model.resolution, model.max_sequence_length, model.schedule.kind, config.evaluation.steps)
    assert found == MODELS[name]


def test_the_command_in_dance_grpos_file_has_the_released_lora_guidance_size_grid_and_groups() -> None:
    lines = [line[1:] for line in (CONFIGS / "methods/dance_grpo.yaml").read_text().splitlines() if line[:1] == "#"]
    words = shlex.split("".join(line for line in lines if line.startswith("  ")))
    named, overrides = words[2 : words.index("--set")], words[words.index("--set") + 1 :: 2]
    config = load([next(CONFIGS.glob(f"*/{name}.yaml")) for name in named], overrides)
    check(config)
    # XueZeyue/DanceGRPO, the script for eight GPUs with LoRA: two prompts a GPU, 12 images each, 720 px, shift 3.
    assert (config.model.lora.rank, config.model.lora.alpha, config.model.guidance) == (128, 256, 3.5)
    assert (config.model.resolution, config.rollout.prompts, config.rollout.keep) == (720, 2 * 8, 12)
    assert (config.rollout.strategy, config.rewards[0].kind, config.learner.world_size) == ("direct", "hpsv2", 8)
    tokens = (720 // 16) ** 2
    shifted = [3 * u / (1 + 2 * u) for u in (1 - i / 12 for i in range(13))]
    assert sigmas(config.model.schedule, 12, tokens).tolist() == pytest.approx(shifted, abs=1e-12)

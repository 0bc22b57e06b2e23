"""Keys that contradict each other are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from solrl_ray.config import checks
from solrl_ray.config.loading import load, load_with_sources
from solrl_ray.config.strategies import pool_sampling, pool_unit_seconds
from solrl_ray.errors import UserError
from solrl_ray.records import Pruning
from tests.support.sentences import names

COLOCATED = (
    "fleet={placement: colocated, explorers: {num_gpus: 1}, regenerators: {num_gpus: 1}, learners: {num_gpus: 1}}"
)
PRUNED = "rollout.preview.prune={after: 2, keep: 36}"


CONTRADICTIONS = """
rollout.keep | 98 rollout.pool 96 | rollout.keep=98
rollout.keep | 23 | rollout.keep=23
rewards.0.kind | clip_edit model.references 0 | rewards=[{kind: clip_edit, path: p}]
rewards.0.remote.references | true model.references 0 \
  | rewards=[{kind: remote, remote: {url: 'http://h', references: true}}]
rollout.explore.micro_batch | 24 rollout.pool 100 20 | rollout.pool=100
rollout.explore.micro_batch | 24 | rollout.pool=20 & rollout.keep=4
rollout.explore.micro_batch | 9000000000000 rollout.pool 96 | rollout.explore.micro_batch=9000000000000
learner.updates | 9000000000000 rollout.prompts 48 | learner.updates=9000000000000
rollout.keep | 24 96 direct | rollout.strategy=direct
rollout.regenerate.micro_batch | 7 96 6 | rollout.strategy=scaled & rollout.regenerate.micro_batch=7
rollout.accept_quantized_training | false true quantized | rollout.strategy=quantized & rollout.explore.precision=fp8
learner.epochs | 2 1 diffusion_nft objective.clip_range | learner.epochs=2
objective.step_range | [4, 4] 10 rollout.regenerate.steps | objective.step_range=[4, 4]
objective.step_range | [4, 11] 10 | objective.step_range=[4, 11]
objective.step_range | [4, 10] 9 | objective={kind: flow_grpo, step_range: [4, 10]} & rollout.sampler={kind: flow_sde}
objective.step_range | [1, 3] rollout.sampler.window \
  | objective={kind: flow_grpo, step_range: [1, 3]} & rollout.explore.steps=10 \
  & rollout.sampler={kind: cps, window: {size: 2, range: [0, 4]}}
objective.timesteps | 6 3 step_range | objective={kind: awm, step_range: [2, 6]}
learner.schedule.steps | 0 1 | learner.schedule.decay=linear
learner.schedule.steps | 9 0 | learner.schedule.steps=9
learner.schedule.steps | 17 15 \
  | run.iterations=10 & learner.updates=2 & learner.schedule={decay: cosine, warmup: 5, steps: 17}
learner.schedule.warmup | 6 4 | run.iterations=4 & learner.schedule.warmup=6
run.on_collapse | "rollback" evaluation.every 0 | run.on_collapse=rollback
run.on_collapse | "stop" evaluation.every 20 run.iterations | run.on_collapse=stop & evaluation.every=20
run.on_collapse | "stop" evaluation.prompts 1 | run.on_collapse=stop & evaluation={every: 5, prompts: 1, pictures: 1}
rollout.explore.precision | "auto" quantized | rollout.strategy=quantized
run.name | "a/b" run.root | run.name=a/b
model.cfg.interval | [0.8, 0.3] 0 1 | model.cfg={scale: 4, interval: [0.8, 0.3]}
evaluation.cfg.scale | 1.0 1 | evaluation.cfg.interval=[0, 0.3]
model.cfg.scale | 1.0 1 | model.cfg.negative_prompt=dull
run.name | ".." | run.name=..
compile.mode | "max-autotune-no-cudagraphs" run.deterministic \
  | run.deterministic=true & compile.mode=max-autotune-no-cudagraphs
fleet.learners.num_gpus | 0.51 1 fleet.placement | fleet.learners.num_gpus=0.51
fleet.regenerators.num_gpus | 0.5 1 fleet.learners.num_gpus fleet.placement \
  | COLOCATED & fleet.regenerators.num_gpus=0.5
fleet.explorers.num_gpus | 1.0 0 fleet.learners.num_gpus | fleet.placement=colocated & fleet.explorers.num_gpus=1
fleet.learners.num_gpus | 2.0 0 1 fleet.placement | COLOCATED & fleet.learners.num_gpus=2
rollout.max_staleness | 1 0 fleet.placement | COLOCATED & rollout.max_staleness=1
fleet.offload | true fleet.placement | fleet.offload=true
fleet.offload | true fleet.learners.num_gpus 0 | fleet.placement=colocated & fleet.offload=true
fleet.offload | true | COLOCATED & fleet.offload=true & rollout.explore.precision=bf16 & model.dtype=bfloat16
learner.activation_memory | 0.5 0 1 fleet.learners.num_gpus | learner.activation_memory=0.5
learner.activation_memory | 0.5 0 1 compile.learner \
  | learner.activation_memory=0.5 & fleet.learners.num_gpus=1 & compile.learner=false
fleet.explorers.num_gpus | 1.5 1 | fleet.explorers.num_gpus=1.5
fleet.encoders.num_gpus | 1.5 1 | fleet.encoders.num_gpus=1.5
fleet.regenerators.fallback_labels | [{"zone" | fleet.regenerators.fallback_labels=[{zone: b}]
rollout.preview.latent_frames | [0] model.frames | rollout.preview.latent_frames=[0]
rollout.preview.latent_frames | [2, 0] [0, 1, 2] | model.frames=9 & rollout.preview.latent_frames=[2, 0]
rollout.preview.latent_frames | [] | model.frames=9 & rollout.preview.latent_frames=[]
rollout.preview.latent_frames | [1] motion \
  | model.frames=9 & rollout.preview.latent_frames=[1] & rewards=[{kind: motion, enough: 1}]
evaluation.reference | "f.py:g" model.frames | model.frames=9 & evaluation.reference='f.py:g'
evaluation.reference | "picture" | evaluation.reference=picture
model.lora.targets | [] | model.lora.targets=[]
rewards.1.kind | "a:" | rewards.1.kind='a:'
rewards.0.weight | 0.0 0 | rewards.0.weight=0 & rewards.1.weight=0
rollout.explore.precision | "bf16" float32 model.dtype | model.dtype=float32 & rollout.explore.precision=bf16
rollout.explore.precision | "float32" bf16 model.dtype | model.dtype=bfloat16 & rollout.explore.precision=float32
rollout.max_staleness | 1 0 rollout.strategy | rollout.max_staleness=1 & rollout.strategy=scaled
checkpoints.keep | 1 2 rollout.max_staleness | rollout.max_staleness=1 & checkpoints.keep=1
fidelity.floor | empty 1 fidelity.on_low | fidelity.on_low=stop
fidelity.floor | 0.5 rollout.strategy | rollout.strategy=scaled & fidelity.floor=0.5
rollout.preview.prune.keep | 22 rollout.keep 24 | rollout.preview.prune={after: 2, keep: 22}
rollout.preview.prune.keep | empty rollout.keep 24 | rollout.preview.prune={after: 2}
rollout.preview.prune.keep | 37 | rollout.preview.prune={after: 2, keep: 37}
rollout.preview.prune.keep | 96 rollout.pool rollout.preview.prune | rollout.preview.prune={after: 2, keep: 96}
rollout.preview.prune.keep | 36 8 4 rollout.preview.unit | rollout.preview={unit: 24, prune: {after: 2, keep: 36}}
rollout.preview.prune.after | 6 rollout.explore.steps rollout.preview.prune | rollout.preview.prune={after: 6, keep: 36}
rollout.preview.prune.after | empty 6 | rollout.preview.prune={keep: 36}
rollout.preview.prune | {"after" 2 36 rollout.strategy | rollout.strategy=scaled & PRUNED
rollout.selection | "best" rollout.strategy | rollout.strategy=scaled & rollout.selection=best
rollout.selection | "random" rollout.preview.prune | rollout.selection=random & PRUNED
rollout.preview.unit | 48 rollout.strategy rollout.preview.unit | rollout.strategy=scaled & rollout.preview.unit=48
rollout.preview.unit | 40 rollout.pool 96 rollout.explore.micro_batch \
  | rollout.preview.unit=40 & rollout.explore.micro_batch=8
rollout.preview.unit | 12 rollout.pool 96 rollout.explore.micro_batch | rollout.preview.unit=12
rollout.preview.unit | 192 rollout.pool 96 | rollout.preview.unit=192
"""
"""Key | what the message names | overrides."""


@pytest.mark.parametrize("case", CONTRADICTIONS.strip().splitlines())
def test_keys_that_contradict_each_other_are_refused(parts: list[Path], case: str) -> None:
    key, values, overrides = map(str.strip, case.split(" | "))
    overrides = overrides.replace("COLOCATED", COLOCATED).replace("PRUNED", PRUNED)
    loaded = load_with_sources(parts, overrides.split(" & "))
    with pytest.raises(UserError) as caught:
        checks.check(loaded.config, loaded.sources)
    assert names(str(caught.value), key, values)


def test_a_range_without_steps_is_one_problem(parts: list[Path]) -> None:
    loaded = load_with_sources(parts, ["objective={kind: awm, step_range: [4, 4]}"])
    with pytest.raises(UserError) as caught:
        checks.check(loaded.config, loaded.sources)
    assert names(str(caught.value), "objective.step_range", "[4, 4] 10")
    assert "objective.timesteps" not in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "tier"), [("float32", "float32"), ("bfloat16", "bf16"), ("bfloat16", "nvfp4-emulated")]
)
def test_a_preview_may_be_quantised_or_have_the_models_own_arithmetic(parts: list[Path], dtype: str, tier: str) -> None:
    checks.check(load(parts, [f"model.dtype={dtype}", f"rollout.explore.precision={tier}"]))


def test_a_pruned_unit_is_a_pool_unless_it_is_said_otherwise_and_costs_padded_slots(parts: list[Path]) -> None:
    pool = pool_sampling(load(parts, [PRUNED, "rollout.explore.micro_batch=24"]))
    # Four micro-batches of 24 take two steps, then 36 seeds, which fill two of them, take four more.
    assert (pool.unit, pool.pruning, pool.forwards, pool.decodings, pool.padding) == (
        96,
        Pruning(after=2, keep=36),
        4 * 2 + 2 * 4,
        4 + 2,
        12,
    )
    pool = pool_sampling(load(parts, [PRUNED]))
    assert pool.micro_batch == 12
    assert (pool.forwards, pool.decodings, pool.padding) == (8 * 2 + 3 * 4, 8 + 3, 0)
    halves = [PRUNED, "rollout.explore.micro_batch=12", "rollout.preview.unit=48"]
    checks.check(load(parts, halves))
    pool = pool_sampling(load(parts, halves))
    assert (pool.units, pool.pruning, pool.forwards, pool.padding) == (2, Pruning(after=2, keep=18), 4 * 2 + 2 * 4, 6)


@pytest.mark.parametrize(
    ("overrides", "size", "pruned"),
    [
        ([], 24, False),
        (["preview.prune={}"], 24, False),
        (["preview.prune={after: 2, keep: 36}"], 12, True),
        (["preview.prune={after: 2, keep: 36}", "explore.steps=5"], 12, True),
        (["preview.prune={after: 2, keep: 36}", "explore.micro_batch=6"], 6, True),
        (["explore={micro_batch: 24}", "preview={prune: {after: 2, keep: 36}}"], 24, True),
        (["preview.prune={after: 2, keep: 36}", "preview.prune=null"], 24, False),
    ],
)
def test_pruned_previews_have_smaller_micro_batches_unless_it_is_said_otherwise(
    parts: list[Path], overrides: list[str], size: int, pruned: bool
) -> None:
    config = load(parts, [f"rollout.{override}" for override in overrides])
    checks.check(config)
    pool = pool_sampling(config)
    assert (config.rollout.explore.micro_batch, pool.micro_batch) == (size, size)
    assert pool.pruning == (Pruning(after=2, keep=36) if pruned else None)
    if not pruned:
        assert (pool.unit, pool.units, pool.forwards, pool.decodings) == (24, 4, 6, 1)


def test_the_deadline_of_a_unit_grows_with_its_size(parts: list[Path]) -> None:
    assert pool_unit_seconds(load(parts)) == 120.0
    assert pool_unit_seconds(load(parts, ["rollout.preview.unit=48"])) == 240.0
    assert pool_unit_seconds(load(parts, [PRUNED, "rollout.explore.micro_batch=24"])) == 480.0
    assert pool_unit_seconds(load(parts, [PRUNED])) == 960.0
    assert pool_unit_seconds(load(parts, ["rollout.strategy=scaled"])) == 300.0

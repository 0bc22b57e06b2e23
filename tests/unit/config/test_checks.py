"""Keys that contradict each other are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from solrl_ray.config import checks
from solrl_ray.config.loading import load, load_with_sources, to_yaml
from solrl_ray.config.strategies import at_fallback_level, pool_sampling, pool_unit_seconds
from solrl_ray.errors import UserError
from solrl_ray.records import Pruning

COLOCATED = (
    "fleet={placement: colocated, explorers: {num_gpus: 1}, regenerators: {num_gpus: 1}, learners: {num_gpus: 1}}",
)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["rollout.keep=98"], "rollout.keep is 98 (--set); it must be at most rollout.pool, which is 96."),
        (["rollout.keep=23"], "rollout.keep is 23 (--set); it must be even"),
        (
            ["rollout.pool=100"],
            "rollout.explore.micro_batch is 24 (default); it must be a divisor of rollout.pool, "
            "which is 100, such as 20.",
        ),
        (
            ["rollout.pool=20", "rollout.keep=4"],
            "rollout.explore.micro_batch is 24 (default); it must be a divisor of",
        ),
        (["run.name=a/b"], 'run.name is "a/b" (--set); it must be the name of one folder inside run.root.'),
        (["run.name=.."], 'run.name is ".." (--set); it must be the name'),
        (
            ["fleet.hedge=0.5"],
            "fleet.hedge is 0.5 (--set); it must be 0, or at least 1: the medians after which a late",
        ),
        (
            ["run.deterministic=true", "compile.mode=max-autotune-no-cudagraphs"],
            'compile.mode is "max-autotune-no-cudagraphs" (--set); it must be default with run.deterministic: other',
        ),
        (
            ["fleet.learners.num_gpus=0.51"],
            "fleet.learners.num_gpus is 0.51 (--set); it must be 1: a rank has a whole GPU, on which with "
            "fleet.placement colocated (and num_gpus 1 of explorers and regenerators) its process also explores",
        ),
        (
            [*COLOCATED, "fleet.regenerators.num_gpus=0.5"],
            "fleet.regenerators.num_gpus is 0.5 (--set); it must be 1, as fleet.learners.num_gpus, with "
            "fleet.placement colocated, where they share processes.",
        ),
        (
            ["fleet.placement=colocated", "fleet.explorers.num_gpus=1"],
            "fleet.explorers.num_gpus is 1.0 (--set); it must be 0, as fleet.learners.num_gpus",
        ),
        (
            [*COLOCATED, "fleet.learners.num_gpus=2"],
            "fleet.learners.num_gpus is 2.0 (--set); it must be 0 or 1 with fleet.placement colocated: a process has",
        ),
        (
            [*COLOCATED, "publish.mode=branch"],
            'publish.mode is "branch" (--set); it must be packed or lora with fleet.placement colocated',
        ),
        (
            [*COLOCATED, "publish.base=pack", "rollout.explore.precision=fp8"],
            'publish.base is "pack" (--set); it must be checkpoint, because with fleet.placement colocated every',
        ),
        (
            [*COLOCATED, "rollout.max_staleness=1"],
            "rollout.max_staleness is 1 (--set); it must be 0 with fleet.placement colocated: a card explores or",
        ),
        (
            ["fleet.offload=true"],
            "fleet.offload is true (--set); it must be false or null: fleet.placement is split, where an explorer",
        ),
        (
            ["fleet.placement=colocated", "fleet.offload=true"],
            "fleet.offload is true (--set); it must be false or null: fleet.learners.num_gpus is 0, so there is no",
        ),
        (
            [*COLOCATED, "fleet.offload=true", "rollout.explore.precision=bf16", "model.dtype=bfloat16"],
            "fleet.offload is true (--set); it must be false or null: the pool is sampled in full precision",
        ),
        (
            [*COLOCATED, "fleet.offload=true", "compile.cudagraphs=true"],
            "fleet.offload is true (--set); it must be false or null: with compile.cudagraphs a captured graph reads",
        ),
        (
            ["learner.activation_memory=0.5"],
            "learner.activation_memory is 0.5 (--set); it must be 0 or 1, because fleet.learners.num_gpus is 0: a "
            "learner that is not compiled keeps every activation or computes all again.",
        ),
        (
            ["learner.activation_memory=0.5", "fleet.learners.num_gpus=1", "compile.learner=false"],
            "learner.activation_memory is 0.5 (--set); it must be 0 or 1, because compile.learner is false: a learner",
        ),
        (["fleet.encoders.num_gpus=1.5"], "fleet.encoders.num_gpus is 1.5 (--set); it must be a share of one GPU"),
        (
            ["fleet.explorers.num_gpus=1.5"],
            "fleet.explorers.num_gpus is 1.5 (--set); it must be a share of one GPU, at most 1, or a whole number",
        ),
        (
            ["fleet.regenerators.fallback_labels=[{zone: b}]"],
            'fleet.regenerators.fallback_labels is [{"zone": "b"}] (--set); it must be empty without labels beside it',
        ),
        (
            ["evaluation.pictures=65"],
            "evaluation.pictures is 65 (--set); it must be at most evaluation.prompts",
        ),
        (
            ["evaluation.reference=picture"],
            'evaluation.reference is "picture" (--set); it must be a function as',
        ),
        (
            ["model.lora.targets=[]"],
            "model.lora.targets is [] (--set); it must be a list of module-name suffixes",
        ),
        (
            ["rewards.1.kind='a:'"],
            'rewards.1.kind is "a:" (--set); it must be a registered reward, or a function as',
        ),
        (
            ["rewards.0.weight=0", "rewards.1.weight=0"],
            "rewards.0.weight is 0.0 (--set); it must be other than 0",
        ),
        (
            ["model.dtype=float32", "rollout.explore.precision=bf16"],
            'rollout.explore.precision is "bf16" (--set); it must be a quantised tier such as nvfp4-emulated, or '
            "float32, because model.dtype is float32.",
        ),
        (
            ["model.dtype=bfloat16", "rollout.explore.precision=float32"],
            'rollout.explore.precision is "float32" (--set); it must be a quantised tier such as nvfp4-emulated, or '
            "bf16, because model.dtype is bfloat16.",
        ),
        (
            ["fidelity.audit_prompts=49"],
            "fidelity.audit_prompts is 49 (--set); it must be at most rollout.prompts, which is 48.",
        ),
        (
            ["fidelity={audit_prompts: 2, audit_seeds: 1}"],
            "fidelity.audit_seeds is 1 (--set); it must be at least 2, because pairs are compared, and at most the 72",
        ),
        (
            ["fidelity.audit_prompts=1", "rollout.keep=96"],
            "fidelity.audit_prompts is 1 (--set); it must be 0, because 0 of a pool's seeds stay unselected.",
        ),
        (
            ["rollout.max_staleness=1", "rollout.strategy=scaled"],
            "rollout.max_staleness is 1 (--set); it must be 0 with rollout.strategy scaled, whose samples are learned "
            "from",
        ),
        (
            ["rollout.max_staleness=1", "checkpoints.keep=1"],
            "checkpoints.keep is 1 (--set); it must be at least 2 with rollout.max_staleness 1",
        ),
        (
            ["fidelity={fallback: [{steps: 8}]}"],
            "fidelity.floor is empty (default); it must be a number between -1 and 1, below which",
        ),
        (
            ["fidelity.floor=0.5"],
            "fidelity.fallback is [] (default); it must be a list of at least one level, such as [{steps: 8}, ",
        ),
        (
            ["fidelity={floor: 0.5, fallback: [{steps: 8}, {}]}"],
            "fidelity.fallback.1.steps is empty (default); it must be more than 8, unless precision rises: an empty "
            "level changes nothing.",
        ),
        (
            ["fidelity={floor: 0.5, fallback: [{steps: 8}, {steps: 7}]}"],
            "fidelity.fallback.1.steps is 7 (--set); it must be more than 8, which previews have before it.",
        ),
        (
            ["rollout.explore.precision=fp8", "fidelity={floor: 0.5, fallback: [{precision: nvfp4, steps: 10}]}"],
            'fidelity.fallback.0.precision is "nvfp4" (--set); it must be a higher tier than fp8, which previews have',
        ),
        (
            ["rollout.explore.precision=nvfp4", "fidelity={floor: 0.5, fallback: [{precision: nvfp4-emulated}]}"],
            'fidelity.fallback.0.precision is "nvfp4-emulated" (--set); it must be a higher tier than nvfp4, ',
        ),
        (
            ["rollout.explore.precision=auto", "fidelity={floor: 0.5, fallback: [{precision: fp8}]}"],
            'fidelity.fallback.0.precision is "fp8" (--set); it must be a higher tier than auto, which previews have',
        ),
        (
            ["fidelity={floor: 0.5, fallback: [{precision: float32}]}", "model.dtype=bfloat16"],
            'fidelity.fallback.0.precision is "float32" (--set); it must be a quantised tier, or bf16, because ',
        ),
        (
            ["publish.base=pack", "fidelity={floor: 0.5, fallback: [{precision: bf16}]}", "model.dtype=bfloat16"],
            'fidelity.fallback.0.precision is "bf16" (--set); it must be a quantised tier, because with ',
        ),
        (
            ["rollout.sampler.kind=flow_sde", "fidelity={floor: 0.5, fallback: [{steps: 11}]}"],
            "fidelity.fallback.0.steps is 11 (--set); it must be at most rollout.regenerate.steps, which is 10: with",
        ),
        (
            ["rollout.preview.prune={after: 2, keep: 22}"],
            "rollout.preview.prune.keep is 22 (--set); it must be at least rollout.keep, which is 24: those are chosen",
        ),
        (
            ["rollout.preview.prune={after: 2}"],
            "rollout.preview.prune.keep is empty (default); it must be at least rollout.keep, which is 24",
        ),
        (
            ["rollout.preview.prune={after: 2, keep: 37}"],
            "rollout.preview.prune.keep is 37 (--set); it must be even, because half of the previews that go on are",
        ),
        (
            ["rollout.preview.prune={after: 2, keep: 96}"],
            "rollout.preview.prune.keep is 96 (--set); it must be less than rollout.pool, which is 96; "
            "rollout.preview.prune=null finishes all previews.",
        ),
        (
            ["rollout.preview={unit: 24, prune: {after: 2, keep: 36}}"],
            "rollout.preview.prune.keep is 36 (--set); it must be a multiple of 8, so that each of the 4 units of a "
            "pool (rollout.preview.unit) keeps an equal, even share.",
        ),
        (
            ["rollout.preview.prune={after: 6, keep: 36}"],
            "rollout.preview.prune.after is 6 (--set); it must be a whole number less than 6, the steps of a preview "
            "(rollout.explore.steps); rollout.preview.prune=null finishes all previews.",
        ),
        (
            ["rollout.preview.prune={keep: 36}"],
            "rollout.preview.prune.after is empty (default); it must be a whole number less than 6, the steps of",
        ),
        (
            ["rollout.strategy=scaled", "rollout.preview.prune={after: 2, keep: 36}"],
            'rollout.preview.prune is {"after": 2, "keep": 36} (--set); it must be empty with rollout.strategy scaled, '
            "which has no previews: rollout.preview.prune=null.",
        ),
        (
            ["rollout.strategy=scaled", "rollout.selection=best"],
            'rollout.selection is "best" (--set); it must be best_worst with rollout.strategy scaled.',
        ),
        (
            ["rollout.selection=random", "rollout.preview.prune={after: 2, keep: 36}"],
            'rollout.selection is "random" (--set); it must be best_worst with rollout.preview.prune, which finishes',
        ),
        (
            ["rollout.strategy=scaled", "rollout.preview.unit=48"],
            "rollout.preview.unit is 48 (--set); it must be empty with rollout.strategy scaled, which has no previews: "
            "rollout.preview.unit=null.",
        ),
        (
            ["rollout.preview.unit=40", "rollout.explore.micro_batch=8"],
            "rollout.preview.unit is 40 (--set); it must be a divisor of rollout.pool, which is 96, and a multiple of "
            "rollout.explore.micro_batch, which is 8: the whole pool, or an equal part of it.",
        ),
        (
            ["rollout.preview.unit=12"],
            "rollout.preview.unit is 12 (--set); it must be a divisor of rollout.pool, which is 96, and a multiple of "
            "rollout.explore.micro_batch, which is 24",
        ),
        (
            ["rollout.preview.unit=192"],
            "rollout.preview.unit is 192 (--set); it must be a divisor of rollout.pool, which is 96",
        ),
        (
            ["rollout.preview.prune={after: 2, keep: 36}", "fidelity={audit_prompts: 1, audit_seeds: 61}"],
            "fidelity.audit_seeds is 61 (--set); it must be at least 2, because pairs are compared, and at most the 60 "
            "seeds of a pool that are dropped.",
        ),
        (
            [
                "rollout.preview.prune={after: 2, keep: 36}",
                "fidelity={floor: 0.5, fallback: [{prune: {after: 3, keep: 32}}]}",
            ],
            'fidelity.fallback.0.prune is {"after": 3, "keep": 32} (--set); it must be later or with more seeds that '
            "go on, for previews before it are pruned after 2 steps to 36 seeds.",
        ),
        (
            ["fidelity={floor: 0.5, fallback: [{steps: 8, prune: {after: 3, keep: 48}}]}"],
            'fidelity.fallback.0.prune is {"after": 3, "keep": 48} (--set); it must be later or with more seeds that '
            "go on, for previews before it are pruned not at all.",
        ),
        (
            ["rollout.preview.prune={after: 2, keep: 36}", "fidelity={floor: 0.5, fallback: [{prune: {after: 6}}]}"],
            "fidelity.fallback.0.prune.after is 6 (--set); it must be a whole number less than 6, the steps of a "
            "preview; fidelity.fallback.0.prune={} finishes all previews.",
        ),
        (
            ["rollout.preview.prune={after: 2, keep: 36}", "fidelity={floor: 0.5, fallback: [{}]}"],
            "fidelity.fallback.0.steps is empty (default); it must be more than 6, unless precision rises or less is "
            "pruned: an empty level changes nothing.",
        ),
        (
            ["rollout.strategy=scaled", "fidelity={floor: 0.5, fallback: [{steps: 8}]}"],
            "fidelity.floor is 0.5 (--set); it must be empty, because rollout.strategy scaled has no previews.",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(parts: list[Path], overrides: list[str], problem: str) -> None:
    loaded = load_with_sources(parts, overrides)
    with pytest.raises(UserError) as caught:
        checks.check(loaded.config, loaded.sources)
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    ("dtype", "tier"), [("float32", "float32"), ("bfloat16", "bf16"), ("bfloat16", "nvfp4-emulated")]
)
def test_a_preview_may_be_quantised_or_have_the_models_own_arithmetic(parts: list[Path], dtype: str, tier: str) -> None:
    checks.check(load(parts, [f"model.dtype={dtype}", f"rollout.explore.precision={tier}"]))


@pytest.mark.parametrize("overrides", [[], ["prune={}"], ["prune={after: 2, keep: 36}", "prune=null"]])
def test_previews_are_not_pruned_if_prune_is_empty(parts: list[Path], overrides: list[str]) -> None:
    config = load(parts, [f"rollout.preview.{override}" for override in overrides])
    checks.check(config)
    pool = pool_sampling(config)
    assert (pool.pruning, pool.unit, pool.units, pool.forwards, pool.decodings) == (None, 24, 4, 6, 1)


def test_a_pruned_unit_is_a_pool_unless_it_is_said_otherwise_and_costs_padded_slots(parts: list[Path]) -> None:
    pruned = ["rollout.preview.prune={after: 2, keep: 36}"]
    pool = pool_sampling(load(parts, [*pruned, "rollout.explore.micro_batch=24"]))
    # Four micro-batches of 24 take two steps, then 36 seeds, which fill two of them, take four more.
    assert (pool.unit, pool.pruning, pool.forwards, pool.decodings, pool.padding) == (
        96,
        Pruning(after=2, keep=36),
        4 * 2 + 2 * 4,
        4 + 2,
        12,
    )
    pool = pool_sampling(load(parts, pruned))
    assert pool.micro_batch == 12
    assert (pool.forwards, pool.decodings, pool.padding) == (8 * 2 + 3 * 4, 8 + 3, 0)
    halves = [*pruned, "rollout.explore.micro_batch=12", "rollout.preview.unit=48"]
    checks.check(load(parts, halves))
    pool = pool_sampling(load(parts, halves))
    assert (pool.units, pool.pruning, pool.forwards, pool.padding) == (2, Pruning(after=2, keep=18), 4 * 2 + 2 * 4, 6)


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        ([], 24),
        (["preview.prune={}"], 24),
        (["preview.prune={after: 2, keep: 36}"], 12),
        (["preview.prune={after: 2, keep: 36}", "explore.steps=5"], 12),
        (["preview.prune={after: 2, keep: 36}", "explore.micro_batch=6"], 6),
        (["explore={micro_batch: 24}", "preview={prune: {after: 2, keep: 36}}"], 24),
        (["preview.prune={after: 2, keep: 36}", "preview.prune=null"], 24),
    ],
)
def test_pruned_previews_have_smaller_micro_batches_unless_it_is_said_otherwise(
    parts: list[Path], overrides: list[str], size: int
) -> None:
    config = load(parts, [f"rollout.{override}" for override in overrides])
    assert (config.rollout.explore.micro_batch, pool_sampling(config).micro_batch) == (size, size)


def test_a_fallback_level_that_prunes_no_more_keeps_the_micro_batch(parts: list[Path], tmp_path: Path) -> None:
    ladder = "fidelity={floor: 0.5, fallback: [{prune: {}}]}"
    level = at_fallback_level(load(parts, ["rollout.preview.prune={after: 2, keep: 36}", ladder]), 1)
    stored = tmp_path / "stored.yaml"
    stored.write_text(to_yaml(level))
    for config in (level, load([stored])):
        pool = pool_sampling(config)
        assert (pool.pruning, pool.micro_batch, pool.unit) == (None, 12, 96)


def test_the_deadline_of_a_unit_grows_with_its_size(parts: list[Path]) -> None:
    assert pool_unit_seconds(load(parts)) == 120.0
    assert pool_unit_seconds(load(parts, ["rollout.preview.unit=48"])) == 240.0
    pruned = ["rollout.preview.prune={after: 2, keep: 36}"]
    assert pool_unit_seconds(load(parts, [*pruned, "rollout.explore.micro_batch=24"])) == 480.0
    assert pool_unit_seconds(load(parts, pruned)) == 960.0
    assert pool_unit_seconds(load(parts, ["rollout.strategy=scaled"])) == 300.0

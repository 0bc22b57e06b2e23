"""Configuration: what may be written, how parts merge, and the sentence that answers each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from solrl_ray.config import checks, continuation, yaml12
from solrl_ray.config.families import warnings
from solrl_ray.config.loading import Sources, load, load_with_sources, to_yaml
from solrl_ray.errors import UserError
from tests.small import small_config

MODEL = """
model:
  family: flux
  path: some/model
  resolution: 512
  max_sequence_length: 128
  schedule: {kind: flux}
  lora: {targets: [to_q, to_k]}
"""
REST = """
prompts: {train: train.txt, heldout: heldout.txt}
rewards:
  - {kind: clipscore, path: some/clip}
  - {kind: "package.module:function", weight: 0.5}
"""


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Two files that make a whole configuration, every other value a default."""
    model, rest = tmp_path / "model.yaml", tmp_path / "rest.yaml"
    model.write_text(MODEL)
    rest.write_text(REST)
    return [model, rest]


def refusal(files: list[Path], *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(files, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- scalars --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 0.0003),
        ("1e-4", 0.0001),
        ("-2.5E+3", -2500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("~", None),
        ("", None),
        ("'3e-4'", "3e-4"),
        ("[1, 2.0]", [1, 2.0]),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    parsed = yaml12.parse(text, "text")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("tree", [{"a": "3e-4"}, {"a": "no"}, {"a": 3e-4, "b": [1e-8, "7", 7]}, {"a": "~", "b": None}])
def test_what_is_dumped_is_read_back_as_the_same_types(tree: Any) -> None:
    assert repr(yaml12.parse(yaml12.dump(tree), "text")) == repr(tree)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3", "file.yaml, line 3: the key 'a' appears twice in one section."),
        ("a: {b: 1, b: 1}", "file.yaml, line 1: the key 'b' appears twice in one section."),
        ("1: 2", "file.yaml, line 1: the key 1 must be text."),
        ("a: .inf", "file.yaml, line 1: .inf is no finite number."),
        ("a: 1e999", "file.yaml, line 1: 1e999 is no finite number."),
        ("a: !!set {b}", "file.yaml, line 1: could not determine a constructor for the tag"),
        ("a: [1", "file.yaml, line 1: expected ',' or ']'"),
        ("a: &x [*x]", "file.yaml, line 1: found unconstructable recursive node."),
    ],
)
def test_bad_yaml_names_file_and_line(text: str, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        yaml12.parse(text, "file.yaml")
    assert str(caught.value).startswith(problem)


def test_anchors_and_merge_keys_work() -> None:
    text = "base: &base {a: 1, b: 2}\nother: {<<: *base, b: 3}"
    assert yaml12.parse(text, "text")["other"] == {"a": 1, "b": 3}


# --- merging --------------------------------------------------------------------------------------


def test_later_files_win_mappings_merge_and_lists_are_replaced(parts: list[Path], tmp_path: Path) -> None:
    later = tmp_path / "later.yaml"
    later.write_text("model: {resolution: 256, lora: {targets: [to_v]}}\nrollout: {preview: {steps: 4}}")
    config = load([*parts, later])
    assert config.model.resolution == 256
    assert config.model.lora.targets == ["to_v"]
    assert config.model.lora.rank == 32
    assert config.model.max_sequence_length == 128
    assert (config.rollout.preview.steps, config.rollout.preview.micro_batch) == (4, 24)


def test_included_files_come_first_and_are_found_beside_the_including_one(parts: list[Path], tmp_path: Path) -> None:
    whole = tmp_path / "runs" / "whole.yaml"
    whole.parent.mkdir()
    whole.write_text("include: [../model.yaml, ../rest.yaml]\nmodel: {resolution: 1024}")
    assert load([whole]) == load(parts, ["model.resolution=1024"])


def test_who_includes_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "whole.yaml").write_text("include: nowhere.yaml")
    included = f"{tmp_path}/nowhere.yaml, which {tmp_path}/whole.yaml includes, does not exist."
    assert refusal([tmp_path / "whole.yaml"]) == f"The configuration file {included}"


def test_files_that_include_each_other_are_refused(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("include: two.yaml")
    two.write_text("include: [one.yaml]")
    assert "go round in a circle" in refusal([one])


def test_overrides_are_yaml_and_reach_into_lists(parts: list[Path]) -> None:
    config = load(
        parts,
        [
            "rewards.1.weight=2",
            "learner.optimizer.lr=1e-3",
            "model.lora.targets=[a, b]",
            "rollout={pool: 48, keep: 2}",
        ],
    )
    assert config.rewards[1].weight == 2.0
    assert config.rewards[0].path == "some/clip"
    assert config.learner.optimizer.lr == 0.001
    assert config.model.lora.targets == ["a", "b"]
    assert (config.rollout.pool, config.rollout.keep, config.rollout.prompts) == (48, 2, 48)


def test_values_remember_where_they_came_from(parts: list[Path]) -> None:
    sources = load_with_sources(parts, ["rollout.pool=48", "rewards.1.weight=2"]).sources
    assert sources.of("model.resolution") == str(parts[0])
    assert sources.of("rewards.0.path") == str(parts[1])
    assert sources.of("rewards.1.weight") == "--set"
    assert sources.of("rollout.pool") == "--set"
    assert sources.of("learner.optimizer.lr") == "default"


def test_the_resolved_configuration_reads_back_equal(parts: list[Path], tmp_path: Path) -> None:
    config = load(parts, ["run.name='1e-4'", "learner.optimizer.betas=[0.5, 0.75]", "objective.kl=1e-7"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load([tmp_path / "config.yaml"]) == config


# --- mistakes -------------------------------------------------------------------------------------


def test_an_unknown_key_is_answered_with_the_nearest_one(parts: list[Path], tmp_path: Path) -> None:
    typo = tmp_path / "typo.yaml"
    typo.write_text("rollout: {pol: 3}")
    assert refusal([*parts, typo]) == f"Unknown key rollout.pol in {typo}; did you mean rollout.pool?"
    assert refusal(parts, "pool=3") == "Unknown key pool in --set; did you mean rollout.pool?"
    assert (
        refusal(parts, "rewards.0.wieght=3") == "Unknown key rewards.0.wieght in --set; did you mean rewards.0.weight?"
    )
    assert "the keys there are run, model" in refusal(parts, "zzz=3")


def test_a_misspelt_key_is_told_before_the_key_it_leaves_missing(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(MODEL.replace("resolution", "resolutoin") + REST)
    assert refusal([file]) == f"Unknown key model.resolutoin in {file}; did you mean model.resolution?"


def test_a_missing_key_is_named_with_the_files(parts: list[Path]) -> None:
    assert refusal(parts[1:]) == f"The key model is missing from {parts[1]}; name a file of configs/models, too."
    parts[0].write_text(MODEL.replace("path: some/model", ""))
    assert refusal(parts) == f"The key model.path is missing from {parts[0]}, {parts[1]}."


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("rollout.pool=many", 'rollout.pool in --set is "many"; it must be a whole number.'),
        ("rollout.pool='64'", 'rollout.pool in --set is "64"; it must be a whole number.'),
        ("rollout.pool=24.5", "rollout.pool in --set is 24.5; it must be a whole number."),
        ("rollout.pool=0", "rollout.pool in --set is 0; it must be at least 1."),
        ("rollout.pool=", "rollout.pool in --set is empty; it must be a whole number."),
        ("learner.optimizer.lr=-1", "learner.optimizer.lr in --set is -1; it must be more than 0."),
        (
            "learner.gradient_checkpointing=yes",
            'learner.gradient_checkpointing in --set is "yes"; it must be true or',
        ),
        ("run.name=7", "run.name in --set is 7; it must be text (put it in quotes)."),
        ("rollout.solver=heun", "rollout.solver in --set is \"heun\"; it must be one of 'euler' or 'dpm2'."),
        (
            "objective.timestep_fraction=1.5",
            "objective.timestep_fraction in --set is 1.5; it must be at most 1.",
        ),
        ("rewards=[]", "rewards in --set is []; it must be a list of at least 1."),
        ("model.lora.targets=to_q", 'model.lora.targets in --set is "to_q"; it must be a list.'),
        (
            "learner.optimizer.betas=[1]",
            "learner.optimizer.betas in --set is [1]; it must be a list of two numbers.",
        ),
        (
            "rollout=3",
            "rollout in --set is 3; it must be a section with the keys family, accept_quantized_training, prompts",
        ),
        (
            "rewards.2.weight=1",
            "--set rewards.2: rewards is a list of 2, so '2' must be a whole number below 2.",
        ),
        (
            "rewards.first.weight=1",
            "--set rewards.first: rewards is a list of 2, so 'first' must be a whole number",
        ),
        (
            "fleet.learners.count=2",
            "Unknown key fleet.learners.count in --set; did you mean learner.world_size?",
        ),
        ("rollout.pool", "--set rollout.pool: it must read key=value, such as rollout.pool=64."),
        ("rollout..pool=1", "--set rollout..pool=1: it must read key=value"),
        ("rollout.pool=[1", "--set rollout.pool, line 1: expected ',' or ']'"),
    ],
)
def test_a_wrong_value_is_answered_with_key_source_value_and_what_is_right(
    parts: list[Path], override: str, problem: str
) -> None:
    assert refusal(parts, override).startswith(problem)


def test_files_that_are_missing_or_no_mapping_are_refused(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n- 2")
    assert refusal([tmp_path / "no.yaml"]) == f"The configuration file {tmp_path / 'no.yaml'} does not exist."
    assert refusal([tmp_path]) == f"The configuration file {tmp_path} is a folder."
    assert "is a mapping of keys to values, this is [1, 2]" in refusal([tmp_path / "list.yaml"])
    assert refusal([]) == "No configuration file was given."


# --- relations between keys -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["rollout.keep=98"], "rollout.keep is 98 (--set); it must be at most rollout.pool, which is 96."),
        (["rollout.keep=23"], "rollout.keep is 23 (--set); it must be even"),
        (
            ["rollout.pool=100"],
            "rollout.preview.micro_batch is 24 (default); it must be a divisor of rollout.pool, "
            "which is 100, such as 20.",
        ),
        (
            ["rollout.pool=20", "rollout.keep=4"],
            "rollout.preview.micro_batch is 24 (default); it must be a divisor of",
        ),
        (["run.name=a/b"], 'run.name is "a/b" (--set); it must be the name of one folder inside run.root.'),
        (["run.name=.."], 'run.name is ".." (--set); it must be the name'),
        (["run.seed=-1"], "run.seed is -1 (--set); it must be at least 0."),
        (["objective.beta=0"], "objective.beta is 0.0 (--set); it must be more than 0."),
        (["learner.ema_cap=1.5"], "learner.ema_cap is 1.5 (--set); it must be between 0 and 1."),
        (
            ["learner.optimizer.betas=[0.9, 1]"],
            "learner.optimizer.betas.1 is 1.0 (--set); it must be at least 0 and",
        ),
        (
            ["fleet.hedge=0.5"],
            "fleet.hedge is 0.5 (--set); it must be 0, or at least 1: how many medians a unit may be",
        ),
        (
            ["run.deterministic=true", "compile.mode=max-autotune-no-cudagraphs"],
            'compile.mode is "max-autotune-no-cudagraphs" (--set); it must be default with run.deterministic: other',
        ),
        (["fleet.learners.num_gpus=-1"], "fleet.learners.num_gpus is -1.0 (--set); it must be at least 0."),
        (
            ["evaluation.pictures=65"],
            "evaluation.pictures is 65 (--set); it must be at most evaluation.prompts",
        ),
        (
            ["evaluation.reference=picture"],
            'evaluation.reference is "picture" (--set); it must be a callable',
        ),
        (
            ["model.lora.targets=[]"],
            "model.lora.targets is [] (--set); it must be a list of module-name suffixes",
        ),
        (
            ["rewards.1.kind='a:'"],
            'rewards.1.kind is "a:" (--set); it must be a registered reward or a callable',
        ),
        (
            ["rewards.0.weight=0", "rewards.1.weight=0"],
            "rewards.0.weight is 0.0 (--set); it must be other than 0",
        ),
        (["prompts.train=''"], 'prompts.train is "" (--set); it must be a path.'),
        (
            ["model.dtype=float32", "rollout.preview.precision=bf16"],
            'rollout.preview.precision is "bf16" (--set); it must be a quantised tier such as nvfp4-emulated, or '
            "float32, because model.dtype is float32.",
        ),
        (
            ["model.dtype=bfloat16", "rollout.preview.precision=float32"],
            'rollout.preview.precision is "float32" (--set); it must be a quantised tier such as nvfp4-emulated, or '
            "bf16, because model.dtype is bfloat16.",
        ),
        (
            ["fidelity.audit_prompts=49"],
            "fidelity.audit_prompts is 49 (--set); it must be at most rollout.prompts, which is 48.",
        ),
        (
            ["fidelity={audit_prompts: 2, audit_seeds: 1}"],
            "fidelity.audit_seeds is 1 (--set); it must be at least 2, for pairs are compared, and at most the 72",
        ),
        (
            ["fidelity.audit_prompts=1", "rollout.keep=96"],
            "fidelity.audit_prompts is 1 (--set); it must be 0, because 0 of a pool's seeds stay unselected.",
        ),
        (
            ["rollout.max_lead=1", "rollout.family=scaled"],
            "rollout.max_lead is 1 (--set); it must be 0 with rollout.family scaled, whose samples are learned from",
        ),
        (
            ["rollout.max_lead=1", "fleet.explorers.num_gpus=0.5", "fleet.learners.num_gpus=0.5"],
            "rollout.max_lead is 1 (--set); it must be 0 where explorers and learners share GPUs",
        ),
        (
            ["rollout.max_lead=1", "checkpoints.keep=1"],
            "checkpoints.keep is 1 (--set); it must be at least 2 with rollout.max_lead 1",
        ),
        (
            ["fidelity={ladder: [{steps: 8}]}"],
            "fidelity.floor is empty (default); it must be a number between -1 and 1, below which",
        ),
        (
            ["fidelity={floor: 1, ladder: [{steps: 8}]}"],
            "fidelity.floor is 1.0 (--set); it must be more than -1 and less than 1, as correlations are.",
        ),
        (
            ["fidelity.floor=0.5"],
            "fidelity.ladder is [] (default); it must be a list of at least one rung, such as [{steps: 8}, ",
        ),
        (
            ["fidelity={floor: 0.5, ladder: [{steps: 8}, {}]}"],
            "fidelity.ladder.1.steps is empty (default); it must be more than 8, unless precision rises: an empty rung "
            "changes nothing.",
        ),
        (
            ["fidelity={floor: 0.5, ladder: [{steps: 8}, {steps: 7}]}"],
            "fidelity.ladder.1.steps is 7 (--set); it must be more than 8, which previews have before it.",
        ),
        (
            ["rollout.preview.precision=fp8", "fidelity={floor: 0.5, ladder: [{precision: nvfp4, steps: 10}]}"],
            'fidelity.ladder.0.precision is "nvfp4" (--set); it must be a higher tier than fp8, which previews have',
        ),
        (
            ["rollout.preview.precision=nvfp4", "fidelity={floor: 0.5, ladder: [{precision: nvfp4-emulated}]}"],
            'fidelity.ladder.0.precision is "nvfp4-emulated" (--set); it must be a higher tier than nvfp4, ',
        ),
        (
            ["rollout.preview.precision=auto", "fidelity={floor: 0.5, ladder: [{precision: fp8}]}"],
            'fidelity.ladder.0.precision is "fp8" (--set); it must be a higher tier than auto, which previews have',
        ),
        (
            ["fidelity={floor: 0.5, ladder: [{precision: float32}]}", "model.dtype=bfloat16"],
            'fidelity.ladder.0.precision is "float32" (--set); it must be a quantised tier, or bf16, because ',
        ),
        (
            ["publish.base=pack", "fidelity={floor: 0.5, ladder: [{precision: bf16}]}", "model.dtype=bfloat16"],
            'fidelity.ladder.0.precision is "bf16" (--set); it must be a quantised tier, because with ',
        ),
        (
            ["rollout.sampler.kind=flow_sde", "fidelity={floor: 0.5, ladder: [{steps: 11}]}"],
            "fidelity.ladder.0.steps is 11 (--set); it must be at most rollout.full.steps, which is 10.",
        ),
        (
            ["rollout.family=scaled", "fidelity={floor: 0.5, ladder: [{steps: 8}]}"],
            "fidelity.floor is 0.5 (--set); it must be empty, because rollout.family scaled has no previews.",
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
    checks.check(load(parts, [f"model.dtype={dtype}", f"rollout.preview.precision={tier}"]))


def test_every_key_that_a_range_is_given_for_exists(parts: list[Path]) -> None:
    checks.check(load(parts))


# --- continuation -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    [
        "fleet.explorers.count=7",
        "run.iterations=99",
        "fleet.deadlines.update=1",
        "learner.world_size=3",
        "learner.zero_stage=2",
        "checkpoints.keep=9",
        "checkpoints.min_free_gb=0",
        "evaluation.every=5",
    ],
)
def test_a_resumed_run_may_change_who_works_how_long_and_what_is_kept(parts: list[Path], override: str) -> None:
    continuation.check(load(parts, [override]), load(parts), Path("runs/run"), Sources())


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "rollout.pool=48",
            "rollout.pool is 48 (--set), but the run in runs/run was begun with 96; a resumed run",
        ),
        ("rewards.1.weight=2", "rewards.1.weight is 2.0 (--set), but the run in runs/run was begun with 0.5"),
        (
            "rewards=[{kind: x}]",
            'rewards.0.kind is "x" (--set), but the run in runs/run was begun with "clipscore"',
        ),
        (
            "run.seed=1",
            "run.seed is 1 (--set), but the run in runs/run was begun with 42; a resumed run may change only fleet, "
            "learner.world_size, learner.zero_stage, run.iterations, evaluation.every, evaluation.share, checkpoints "
            "and compile.cache.",
        ),
        ("evaluation.samples=5", "evaluation.samples is 5 (--set), but the run in runs/run was begun with 4"),
    ],
)
def test_a_resumed_run_may_change_nothing_else(parts: list[Path], override: str, problem: str) -> None:
    given = load_with_sources(parts, [override])
    with pytest.raises(UserError) as caught:
        continuation.check(given.config, load(parts), Path("runs/run"), given.sources)
    assert str(caught.value).startswith(problem)


def test_a_reward_that_was_dropped_is_a_difference(parts: list[Path]) -> None:
    fewer = load(parts, ["rewards=[{kind: clipscore, path: some/clip}]"])
    assert continuation.first_difference(fewer, load(parts), free=continuation.FREE) == "rewards.1.kind"


@pytest.mark.parametrize(
    ("override", "note"),
    [
        ("fleet.learners.threads=4", "fleet.learners.threads is 4 and was 2"),
        ("learner.world_size=3", "learner.world_size is 3 and was 1"),
        ("learner.zero_stage=2", "learner.zero_stage is 2 and was 1"),
    ],
)
def test_a_change_that_splits_sums_differently_is_noted_as_it_may_change_bytes(
    parts: list[Path], override: str, note: str
) -> None:
    (found,) = continuation.notes(load(parts, [override]), load(parts))
    assert found.startswith(note)
    assert found.endswith("the bytes may differ from an undisturbed run.")


def test_a_change_that_splits_no_sums_needs_no_note(parts: list[Path]) -> None:
    assert continuation.notes(load(parts, ["fleet.explorers.count=7", "checkpoints.keep=3"]), load(parts)) == []


# --- what is shipped ------------------------------------------------------------------------------

CONFIGS = Path(__file__).parents[2] / "configs"


def test_the_published_recipe_is_what_the_schema_says_by_default(parts: list[Path]) -> None:
    published = load([*parts, CONFIGS / "methods" / "sol_rl.yaml"])
    assert published == load(parts)
    assert published.rollout.prompts * published.rollout.pool == 4608
    assert published.rollout.prompts * published.rollout.keep == 1152


@pytest.mark.parametrize("file", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_every_whole_run_that_is_shipped_is_valid(file: str) -> None:
    loaded = load_with_sources([CONFIGS / file])
    checks.check(loaded.config, loaded.sources)
    assert loaded.config.run.name == Path(file).stem


@pytest.mark.parametrize(
    ("overrides", "said"),
    [((), 0), (("fleet.learners.num_gpus=0.5",), 1), (("fleet.learners.num_gpus=0.5", "run.deterministic=true"), 0)],
)
def test_a_run_on_gpus_says_that_its_bits_may_differ(tmp_path: Path, overrides: tuple[str, ...], said: int) -> None:
    found = warnings(small_config(tmp_path, "run", *overrides))
    assert [sentence.startswith("Not reproducible to the bit") for sentence in found] == [True] * said

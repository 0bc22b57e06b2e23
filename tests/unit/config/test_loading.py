"""Configuration: how parts merge, the sentence that answers each mistake, and what is shipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from solrl_ray.config import checks
from solrl_ray.config.fleet import WorkerPool
from solrl_ray.config.loading import load, load_with_sources, to_yaml
from solrl_ray.config.strategies import warnings
from solrl_ray.errors import UserError
from tests.support.documents import ROOT
from tests.support.made_configs import MODEL, REST, refusal
from tests.support.sentences import names
from tests.support.small import small_config

# --- merging --------------------------------------------------------------------------------------


def test_later_files_win_mappings_merge_and_lists_are_replaced(parts: list[Path], tmp_path: Path) -> None:
    later = tmp_path / "later.yaml"
    later.write_text("model: {resolution: 256, lora: {targets: [to_v]}}\nrollout: {explore: {steps: 4}}")
    config = load([*parts, later])
    assert config.model.resolution == 256
    assert config.model.lora.targets == ["to_v"]
    assert config.model.lora.rank == 32
    assert config.model.max_sequence_length == 128
    assert (config.rollout.explore.steps, config.rollout.explore.micro_batch) == (4, 24)


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
    assert "creates a cycle of includes" in refusal([one])


def test_overrides_are_yaml_and_reach_into_lists(parts: list[Path]) -> None:
    config = load(
        parts,
        ["rewards.1.weight=2", "learner.optimizer.lr=1e-3", "model.lora.targets=[a, b]", "rollout={pool: 48, keep: 2}"],
    )
    assert config.rewards[1].weight == 2.0
    assert config.rewards[0].path == "some/clip"
    assert config.learner.optimizer.lr == 0.001
    assert config.model.lora.targets == ["a", "b"]
    assert (config.rollout.pool, config.rollout.keep, config.rollout.prompts) == (48, 2, 48)


@pytest.mark.parametrize("text", ["007", "1e3", "2024-05-06", "no", "null", "a: b", "[x", "'7'"])
def test_a_key_of_text_takes_what_is_written(parts: list[Path], text: str, tmp_path: Path) -> None:
    assert load(parts, [f"run.name={text}"]).run.name == text.strip("'")
    file = tmp_path / "named.yaml"
    file.write_text("run: {name: 007}")
    assert names(refusal([*parts, file]), "run.name", f"{file} 7 quotes")


def test_an_empty_text_takes_a_value_away(parts: list[Path]) -> None:
    overrides = ["evaluation.reference=my_pictures:draw", "evaluation.reference="]
    assert load(parts, overrides).evaluation.reference == ""
    assert load(parts, ["fleet.offload=null"]).fleet.offload is None  # is no text


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
    assert "the keys of this section are run, model" in refusal(parts, "zzz=3")


def test_a_misspelt_key_is_told_before_the_key_it_leaves_missing(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(MODEL.replace("resolution", "resolutoin") + REST)
    assert refusal([file]) == f"Unknown key model.resolutoin in {file}; did you mean model.resolution?"


def test_a_missing_key_is_named_with_the_files_or_where_its_section_is(parts: list[Path]) -> None:
    assert (
        refusal(parts[1:]) == f"The key model is missing from {parts[1]}; name a model, too (`solrl list` shows them)."
    )
    assert refusal(parts, "rewards=[{}]") == "The key rewards.0.kind is missing from --set."
    parts[0].write_text(MODEL.replace("path: some/model", ""))
    assert refusal(parts) == f"The key model.path is missing from {parts[0]}."


@pytest.mark.parametrize(
    ("override", "key", "values"),
    [
        ("rollout.pool=many", "rollout.pool", '"many"'),
        ("rollout.pool='64'", "rollout.pool", '"64"'),
        ("rollout.pool=24.5", "rollout.pool", "24.5"),
        ("rollout.pool=0", "rollout.pool", "0 1"),
        ("rollout.pool=", "rollout.pool", "empty"),
        ("learner.optimizer.lr=-1", "learner.optimizer.lr", "-1 0"),
        ("run.seed=-1", "run.seed", "-1 0"),
        ("learner.world_size=5000", "learner.world_size", "5000 4096"),
        ("fleet.explorers.count=5000", "fleet.explorers.count", "5000 4096"),
        ("run.iterations=9000000000000", "run.iterations", "9000000000000 1000000"),
        ("objective.beta=0", "objective.beta", "0"),
        ("learner.ema_cap=1.5", "learner.ema_cap", "1.5 1"),
        ("learner.activation_memory=1.5", "learner.activation_memory", "1.5 1"),
        ("learner.activation_memory=-0.1", "learner.activation_memory", "-0.1 0"),
        ("learner.optimizer.betas=[0.9, 1]", "learner.optimizer.betas.1", "1"),
        ("fleet.learners.num_gpus=-1", "fleet.learners.num_gpus", "-1 0"),
        ("prompts.train=''", "prompts.train", '""'),
        ("fidelity.floor=1", "fidelity.floor", "1"),
        ("objective={kind: awm, power: 2}", "objective.power", "2 1"),
        ("rollout.sampler.kind=sde", "rollout.sampler.kind", '"sde"'),
        ("compile.learner=yes", "compile.learner", '"yes"'),
        ("learner.optimizer.lr=.inf", "learner.optimizer.lr", "Infinity"),
        ("learner.optimizer.lr=.nan", "learner.optimizer.lr", "NaN finite"),
        ("rollout.solver=heun", "rollout.solver", '"heun" 2'),
        ("objective.timestep_fraction=1.5", "objective.timestep_fraction", "1.5 1"),
        ("rewards=[]", "rewards", "[] 1"),
        ("model.lora.targets=to_q", "model.lora.targets", '"to_q"'),
        ("learner.optimizer.betas=[0.9]", "learner.optimizer.betas", "[0.9]"),
        ("rollout=3", "rollout", "3"),
        ("model.cfg=4.5", "model.cfg", "4.5 scale negative_prompt interval model.cfg.scale"),
        ("evaluation.cfg=4.5", "evaluation.cfg", "4.5 evaluation.cfg.scale"),
        ("objective=awm", "objective", '"awm" kind'),
        ("rewards.2.weight=1", "--set rewards.2", "'2' 2."),
        ("rewards.first.weight=1", "--set rewards.first", "'first' 2."),
        ("fleet.learners.count=2", "Unknown key fleet.learners.count", "learner.world_size"),
        ("rollout.pool", "--set rollout.pool", "key=value"),
        ("rollout..pool=1", "--set rollout..pool=1", "key=value"),
        ("rollout.pool=[1", "--set rollout.pool, line 1", ""),
    ],
)
def test_a_wrong_value_is_answered_with_key_source_value_and_what_is_right(
    parts: list[Path], override: str, key: str, values: str
) -> None:
    assert names(refusal(parts, override), key, values)


def test_files_that_are_missing_or_no_mapping_are_refused(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n- 2")
    assert refusal([tmp_path / "no.yaml"]) == f"The configuration file {tmp_path / 'no.yaml'} does not exist."
    function = "does not exist; a function is named in a YAML file: rewards: [{kind: 'mine.py:red'}]."
    assert refusal([Path("mine.py:red")]) == f"The configuration file mine.py:red {function}"
    assert refusal([tmp_path]) == f"The configuration file {tmp_path} is a folder."
    (tmp_path / "config.yaml").touch()
    assert f"is a folder; `solrl train --resume {tmp_path}` resumes its run" in refusal([tmp_path])
    (tmp_path / "latin.yaml").write_bytes(b"run:\n  name: caf\xe9\n")
    assert refusal([tmp_path / "latin.yaml"]).startswith(f"{tmp_path / 'latin.yaml'}, line 2, is not UTF-8 text: ")
    assert "must be a mapping of keys to values, not [1, 2]" in refusal([tmp_path / "list.yaml"])
    assert refusal([]) == "No configuration file was given."


# --- what is shipped ------------------------------------------------------------------------------


CONFIGS = Path(__file__).parents[3] / "configs"


def test_the_published_recipe_is_what_the_schema_says_by_default(parts: list[Path]) -> None:
    published = load([*parts, CONFIGS / "methods" / "sol_rl_published.yaml"])
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
    [
        (("rollout.explore.precision=nvfp4-emulated",), False),
        (("rollout.explore.precision=auto", "fleet.explorers.num_gpus=1"), False),
        (("rollout.explore.precision=nvfp4-emulated", "fleet.explorers.num_gpus=1"), True),
        (("rollout={strategy: scaled}", "fleet.explorers.num_gpus=1"), False),
    ],
)
def test_emulated_previews_on_a_card_are_said_to_be_slow(
    tmp_path: Path, overrides: tuple[str, ...], said: bool
) -> None:
    found = warnings(small_config(tmp_path, "run", *overrides))
    assert any(sentence.startswith("Slower than unquantised") for sentence in found) == said


def test_what_was_downloaded_in_place_of_a_configuration_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert names(refusal([file]), str(file), "Git LFS pointer")
    file.write_text("# " + "x" * 300_000)
    assert names(refusal([file]), "The configuration file", "run.yaml 262,144")


def test_an_empty_mapping_empties_a_section(tmp_path: Path) -> None:
    files = [ROOT / "configs" / "demo.yaml", tmp_path / "labels.yaml"]
    files[1].write_text("fleet: {explorers: {labels: {role: explorer, zone: a}, count: 5}}\n")
    assert load(files).fleet.explorers.labels == {"role": "explorer", "zone": "a"}
    assert load(files, ["fleet.explorers.labels={zone: b}"]).fleet.explorers.labels == {"role": "explorer", "zone": "b"}
    emptied = load(files, ["fleet.explorers.labels={}"]).fleet.explorers
    assert (emptied.labels, emptied.count) == ({}, 5)
    assert load(files, ["fleet.explorers={}"]).fleet.explorers == WorkerPool(count=1)
    with pytest.raises(UserError, match=r"^The key objective\.kind is missing from --set\.$"):
        load(files, ["objective={}"])

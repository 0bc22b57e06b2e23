"""Configurations of the package are found by name, in any order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from solrl_ray.config import checks, named
from solrl_ray.config.loading import Sources, load, load_with_sources
from solrl_ray.config.objectives import DiffusionNftConfig
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.errors import UserError
from solrl_ray.models import FAMILIES
from solrl_ray.models.shapes import shipped
from solrl_ray.objectives.schedules import follower_decay
from solrl_ray.planning.arithmetic import describe
from solrl_ray.planning.outline import facts_of
from solrl_ray.records import Pruning
from tests.support.command_line import printed, refusal
from tests.support.sentences import names
from tests.support.small import CONFIGS

RUNS = sorted(path for path in (CONFIGS / "runs").glob("*.yaml") if not path.stem.startswith("wan"))
"""Of pictures."""


def stems(*given: str) -> list[str]:
    return [path.stem for path in named.resolve([Path(name) for name in given])]


def test_names_may_come_in_any_order_and_files_come_after_them() -> None:
    wanted = ["flux1_dev", "two_stage", "diffusion_nft", "hpsv2", "one_gpu_80gb"]
    assert stems(*wanted) == stems(*reversed(wanted)) == wanted
    assert stems("mine.yaml", "hpsv2", "a/flux1_dev.yaml", "flux1_dev") == ["flux1_dev", "hpsv2", "mine", "flux1_dev"]
    assert stems("all_blocks", "sd35_large") == ["sd35_large", "all_blocks"]


def test_a_file_without_an_ending_is_a_file_and_a_folder_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    assert named.resolve([Path("demo")])[0].is_file()
    Path("demo").rmdir()
    Path("demo").write_text("")
    assert named.resolve([Path("demo")]) == [Path("demo")]


def test_a_run_folder_in_place_of_a_configuration_is_told_how_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").touch()
    with pytest.raises(UserError, match=r"^The configuration mine is a folder; `solrl train --resume mine` resumes"):
        stems("mine")


def test_every_configuration_has_a_name_of_its_own() -> None:
    found = [path.stem for path in CONFIGS.glob("**/*.yaml")]
    assert len(set(found)) == len(found)
    assert {named.kind_of(path) for path in CONFIGS.glob("**/*.yaml")} == set(named.ORDER)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (("hpsv2", "two_stage", "flux1_dev"), ["prompts"]),
        (("flux1_dev",), ["rewards", "prompts"]),
        (("two_stage",), ["model", "rewards", "prompts"]),
    ],
)
def test_all_that_is_missing_is_told_with_the_names_that_were_given(
    given: tuple[str, ...], missing: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "plan", *given)
    keys, _, rest = said.partition(" missing from ")
    assert [word for word in re.findall(r"\w+", keys) if word in ("model", "rewards", "prompts")] == missing
    assert set(re.findall(r"\w+", rest.partition("; ")[0])) == set(given)
    assert "--set prompts.train=FILE" in rest


def test_a_configuration_is_printed_without_prompts_but_not_without_a_reward(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "\n  train: train.txt" in printed(capsys, "config", "flux1_dev", "pickscore")
    assert "rewards" in refusal(capsys, "config", "flux1_dev")


@pytest.mark.parametrize(
    ("given", "begin", "named"),
    [
        (("flux1_dve",), "There is no configuration flux1_dve,", "flux1_dev?"),
        (("qwen",), "There is no configuration qwen,", "qwen_image?"),
        (("xyzzy",), "There is no configuration xyzzy,", "`solrl list`"),
        (("flux1_dev", "sana_1600m"), "flux1_dev and sana_1600m", "models"),
        (("two_stage", "direct", "scaled"), "two_stage, direct and scaled", "strategies"),
        (("demo", "flux1_dev_80gb"), "demo and flux1_dev_80gb", "runs"),
        (("pickscore", "hpsv2", "pickscore"), "pickscore and hpsv2", "rewards docs/guides/rewards.md"),
        (("direct", "sol_rl"), "sol_rl includes two_stage,", "direct strategies diffusion_nft"),
    ],
)
def test_a_name_that_is_none_or_one_too_many_is_refused(given: tuple[str, ...], begin: str, named: str) -> None:
    with pytest.raises(UserError) as refused:
        stems(*given)
    assert names(str(refused.value), begin, named)


def test_what_a_part_includes_may_be_named_beside_it_and_a_whole_run_is_no_part() -> None:
    assert stems("sol_rl", "two_stage") == ["two_stage", "sol_rl"]
    assert stems("direct", "demo") == ["demo", "direct"]


def test_rewards_to_score_with_may_be_several_of_a_kind_in_the_order_that_was_given() -> None:
    given = [Path(name) for name in ("pickscore", "mine.yaml", "hpsv2", "pickscore")]
    assert [path.stem for path in named.resolve(given, several=True)] == ["pickscore", "mine", "hpsv2"]
    with pytest.raises(UserError, match=r"did you mean pickscore\?$"):
        named.resolve([Path("pickscor")], several=True)


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_a_whole_run_needs_nothing_but_prompts_prunes_its_previews_and_pads_none(file: Path) -> None:
    config = load([file])
    checks.check(config)
    pool, fleet, shapes = pool_sampling(config), config.fleet, shipped(config.model)
    assert shapes is not None
    describe(config, facts_of(config, Sources(), shapes, "fp8"))
    seeds, finished = (96, 36) if file.stem.endswith("published") else (24, 12)
    assert (pool.unit, pool.pruning) == (seeds, Pruning(after=2, keep=finished))
    assert (pool.micro_batch, pool.padding) == (12, 0)
    samples = config.rollout.prompts * config.rollout.keep // config.learner.updates  # of an optimiser step
    assert samples % (config.learner.world_size * config.learner.micro_batch) == 0
    assert all(worker.num_gpus for worker in (fleet.explorers, fleet.regenerators, fleet.learners))
    assert config.learner.world_size == (8 if file.stem.endswith(("eight_gpus", "published")) else 1)


def test_there_is_a_whole_run_for_every_model_on_one_card_and_on_eight() -> None:
    rest = [CONFIGS / "rewards" / "testbed_clip.yaml"], ["prompts={train: a.txt, heldout: b.txt}"]
    families = {path.stem: load([path, *rest[0]], rest[1]).model.family for path in (CONFIGS / "models").glob("*.yaml")}
    unmeasured = {"testbed", "chroma1_hd"}
    models = {name for name, family in families.items() if not FAMILIES[family].SIZES.frame_stride} - unmeasured
    larger = {
        "qwen_image": "141gb",
        "qwen_image_2512": "141gb",
        "qwen_image_edit": "141gb",
        "qwen_image_edit_2511": "141gb",
    }  # its weights alone are 41 GB, and three workers have them
    wanted = {f"{model}_{cards}" for model in models for cards in (larger.get(model, "80gb"), "eight_gpus")}
    assert {file.stem for file in RUNS} == wanted | {f"{model}_published" for model in PUBLISHED}


@pytest.mark.parametrize("model", ["wan21_1_3b", "wan22_5b"])
def test_a_whole_run_of_videos_scores_chosen_frames_and_pads_no_preview(model: str) -> None:
    config = load([CONFIGS / "runs" / f"{model}_80gb.yaml"])
    given = ["prompts={train: a.txt, heldout: b.txt}", "rewards=[{kind: motion, enough: 0.02}]"]
    alone = load([CONFIGS / "models" / f"{model}.yaml", CONFIGS / "methods" / "sol_rl.yaml"], given)
    assert (config.run.name, config.model) == (model, alone.model)
    checks.check(config)
    pool = pool_sampling(config)
    assert (pool.unit, pool.pruning, pool.micro_batch, pool.padding) == (24, Pruning(after=3, keep=12), 2, 0)
    assert config.model.shapes[0].frames == 49
    assert [reward.frames.count if reward.frames else None for reward in config.rewards] == [4, None]


PUBLISHED = {"flux1_dev": (113, 169), "sd35_large": (150, 427), "sana_1600m": (60, 76)}
"""GPU-hours of the paper's plots, and seconds of an iteration on eight GPUs."""


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_run_has_the_published_budget_and_evaluation(model: str) -> None:
    hours, seconds = PUBLISHED[model]
    config, eight = (load([CONFIGS / f"runs/{model}_{name}.yaml"]) for name in ("published", "eight_gpus"))
    assert abs(config.run.iterations - hours * 3600 / 8 / seconds) <= 1.01
    evaluation = config.evaluation
    assert (evaluation.every, evaluation.prompts, evaluation.samples) == (20, 2048, 1)
    assert (evaluation.steps, config.checkpoints.every) == ({"flux1_dev": 28}.get(model, 40), 20)
    alike = ("model", "rewards", "fleet", "publish", "compile")
    assert all(getattr(config, name) == getattr(eight, name) for name in alike)
    assert config.objective == eight.objective.model_copy(update={"shared_noise": False})
    assert (config.rollout.prompts, config.rollout.pool, config.rollout.keep) == (48, 96, 24)
    assert (config.learner.optimizer_steps, config.learner.optimizer.lr) == (1, 3e-4)


@pytest.mark.parametrize("model", PUBLISHED)
def test_no_default_and_no_other_method_decides_how_a_published_run_learns(model: str) -> None:
    loaded = load_with_sources([CONFIGS / f"runs/{model}_published.yaml"])
    leaves = {
        f"{name}.{key}": loaded.sources.of(f"{name}.{key}")
        for name in ("rollout", "objective", "learner")
        for key in leaves_of(getattr(loaded.config, name).model_dump())
    }
    free = ("rollout.accept_quantized_training", "learner.activation_memory")
    shared = {Path(source).name for key, source in leaves.items() if key not in free}
    own = {f"{model}.yaml", f"{model}_published.yaml", "eight_gpus.yaml"}
    assert shared == own | {"sol_rl_published.yaml"}


def leaves_of(section: dict[str, Any], before: str = "") -> Iterator[str]:
    """Dotted keys that are no sections."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from leaves_of(value, f"{before}{key}.")
        else:
            yield before + key


def test_the_table_of_the_paper_and_its_code_are_a_method_each() -> None:
    code, table = (
        load(named.resolve([Path("flux1_dev_published"), Path(name)])).objective
        for name in ("diffusion_nft", "diffusion_nft_paper")
    )
    assert isinstance(code, DiffusionNftConfig)
    assert isinstance(table, DiffusionNftConfig)
    assert (code.kl, code.timestep_fraction, code.beta) == (1e-4, 0.4, 1.0)
    assert (table.kl, table.timestep_fraction, table.beta) == (1.0, 0.6, 1.0)
    decays = [[follower_decay(objective.old_decay, step) for step in (1, 100, 900)] for objective in (code, table)]
    assert decays == [pytest.approx([0.001, 0.1, 0.5]), pytest.approx([0.9, 0.9, 0.9])]


def test_the_four_rewards_of_the_published_tables_are_those_of_their_own_files() -> None:
    whole = [CONFIGS / "runs" / "flux1_dev_published.yaml"]
    four = ("imagereward", "clipscore", "pickscore", "hpsv2")
    alone = [load([*whole, CONFIGS / f"rewards/{name}.yaml"]).rewards[0] for name in four]
    assert load([*whole, CONFIGS / "evaluations/published_rewards.yaml"]).rewards == alone


def test_the_printed_configuration_reads_back_as_the_same_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in (["demo"], ["flux1_dev", "flow_grpo", "mixture", "two_stage", "one_gpu_80gb", "all_blocks"]):
        prompts = ["prompts={train: a.txt, heldout: b.txt}"] if given != ["demo"] else []
        arguments = [word for text in (*prompts, "run.seed=7") for word in ("--set", text)]
        text = printed(capsys, "config", *given, *arguments)
        (tmp_path / "mine.yaml").write_text(text)
        whole = load(named.resolve([Path(name) for name in given]), [*prompts, "run.seed=7"])
        assert load([tmp_path / "mine.yaml"]) == whole
        assert "  # Random seed of the run; every random draw depends on it.\n  seed: 7  # from --set\n" in text
        assert "  # deterministic: false\n" in text
    assert refusal(capsys, "config").startswith("No configuration was named")

"""What ``solrl eval`` is asked for, and how policies and rewards are put side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from solrl_ray.config import named
from solrl_ray.config.loading import load_with_sources, to_yaml
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.errors import UserError
from solrl_ray.evaluation.held_out import evaluation_metrics, reward_names
from solrl_ray.evaluation.request import evaluation_config, free_folder, policies_of, state_of
from solrl_ray.records import Prompt
from solrl_ray.report.comparison import Comparison, write_comparison
from solrl_ray.report.grids import save_pictures
from solrl_ray.storage.continuation import FORMAT
from solrl_ray.storage.run_folder import RunFolder
from tests.support import made_runs
from tests.support.made_checkpoints import small_state as state
from tests.support.made_configs import changed

PROMPTS = [Prompt(id=key, text=text) for key, text in made_runs.CAPTIONS.items()]
DARK = {"aa": (1.0, 3.0), "bb": (2.0, 2.0), "cc": (5.0, 7.0)}
BRIGHT = {"aa": (2.0, 4.0), "bb": (3.0, 3.0), "cc": (6.0, 8.0)}


def compared(**changes: Any) -> Comparison:
    def columns(policy: str, first: dict[str, tuple[float, ...]], second: dict[str, tuple[float, ...]]):  # type: ignore[no-untyped-def]
        named = {"clipscore": first, "brightness": second}
        return {
            name: evaluation_metrics(rewards, updates=3, policy=policy, seconds=0.0, captions={})
            for name, rewards in named.items()
        }

    results = {"base": columns("base", made_runs.BASE, DARK), "ema": columns("ema", made_runs.FINAL, BRIGHT)}
    return Comparison.of(changed(made_runs.config(), **changes), results, PROMPTS, updates=3)


def test_means_and_errors_are_over_prompts_and_gains_are_paired() -> None:
    cells = {(cell.policy, cell.reward): cell for cell in compared().cells}
    # Prompt means of the base 2, 2, 6: mean 10/3, variance 16/3, error sqrt(16/9). Each gained exactly 1.
    base, ema = cells["base", "brightness"], cells["ema", "brightness"]
    assert (base.mean, base.stderr) == pytest.approx((10 / 3, 4 / 3))
    assert (ema.mean, ema.stderr) == pytest.approx((13 / 3, 4 / 3))
    assert (base.gain, ema.gain) == (None, pytest.approx(1.0))
    assert ema.gain_stderr == pytest.approx(0.0, abs=1e-12)
    # Prompt means 0.2, 0.2, 0.6 and 0.4, 0.3, 0.75: gains 0.2, 0.1, 0.15, mean 0.15, deviation 0.05.
    clip = cells["ema", "clipscore"]
    assert (clip.gain, clip.gain_stderr) == pytest.approx((0.15, 0.05 / 3**0.5))


def test_the_table_has_a_row_a_policy_and_a_column_a_reward() -> None:
    _, header, base, ema = compared().table().splitlines()
    assert header.split() == ["clipscore", "brightness"]
    assert base.split("  ")[0].strip() == "base"
    assert "3.333 ± 1.333" in base
    assert "4.333 ± 1.333 (+1.000 ± 0.000)" in ema


def test_the_guidance_of_the_samples_is_said_if_there_is_one() -> None:
    trained = {"guidance": 3.5, "cfg": {"scale": 2.0}}
    evaluated = {"cfg": {"scale": 4.5, "negative_prompt": "dull"}}
    shown = compared(model=trained, evaluation=evaluated)
    assert shown.settings["guidance"] == 'embedded 3.5, scale 4.5 against "dull"'
    assert shown.settings["guidance"] in shown.line()
    assert compared(model=trained, evaluation={"guidance": 1.0}).settings["guidance"] == "scale 2"
    assert "guidance" not in compared().settings


def test_the_page_shows_every_policy_at_the_same_seeds(tmp_path: Path) -> None:
    for policy in ("base", "ema"):
        save_pictures(tmp_path / policy, {("aa", n): torch.full((3, 8, 8), 0.5) for n in (0, 1)})
    write_comparison(tmp_path, compared())
    page = (tmp_path / "evaluation.html").read_text()
    assert page.count("data:image/png") == 4
    assert "a red circle &lt;above&gt; a blue square" in page
    assert "two green triangles" not in page  # has no pictures
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["scores"]["ema"]["clipscore"]["cc"] == [0.6, 0.9]
    assert (tmp_path / "evaluation.txt").read_text() == compared().table() + "\n"


def test_rewards_of_one_kind_have_names_of_their_own() -> None:
    rewards = [
        RewardConfig(kind="clipscore", path="a/large"),
        RewardConfig(kind="m:f"),
        RewardConfig(kind="clipscore", path="b/small"),
    ]
    assert reward_names(rewards) == ["clipscore large", "m:f", "clipscore small"]
    assert reward_names([RewardConfig(kind="m:f"), RewardConfig(kind="m:f")]) == ["m:f", "m:f 2"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "format").write_text(f"{FORMAT}\n")
    (folder / "config.yaml").write_text(to_yaml(made_runs.config()))
    return folder


def test_each_file_of_rewards_adds_its_columns(run: Path, tmp_path: Path) -> None:
    file = run / "config.yaml"
    (tmp_path / "one.yaml").write_text("rewards: [{kind: 'm:f'}]")
    (tmp_path / "two.yaml").write_text("rewards: [{kind: clipscore, path: x}, {kind: 'm:g'}]")
    loaded = load_with_sources([file], ["evaluation.prompts=3", "evaluation.reference='m:real'"])
    files = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    asked = evaluation_config(loaded, file, files, all_prompts=False)
    config = asked.config
    assert [reward.kind for reward in config.rewards] == ["m:f", "clipscore", "m:g"]
    given = [asked.sources.of(key) for key in ("rewards.0.kind", "rewards.1.path", "rewards.2.kind", "rewards.2.path")]
    assert given == [str(files[0]), str(files[1]), str(files[1]), "default"]
    assert asked.sources.of("evaluation.prompts") == "--set"
    assert (config.evaluation.prompts, config.evaluation.pictures, config.evaluation.reference) == (3, 3, "")
    assert evaluation_config(loaded, file, [], all_prompts=False).config.rewards == made_runs.config().rewards
    (tmp_path / "two.yaml").write_text("rewards: [{kind: 'm:g'}]\nrollout: {pool: 48}")
    with pytest.raises(UserError, match=r"two\.yaml sets rollout\.pool, but a file of --rewards may set only"):
        evaluation_config(loaded, file, files, all_prompts=False)


def test_rewards_of_the_package_are_columns_by_their_names(run: Path) -> None:
    file = run / "config.yaml"
    files = named.resolve([Path("pickscore"), Path("hpsv2")], several=True)
    config = evaluation_config(load_with_sources([file]), file, files, all_prompts=False).config
    assert [reward.kind for reward in config.rewards] == ["pickscore", "hpsv2"]


def test_a_file_of_prompts_is_taken_whole(run: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\nb\n")
    overrides = [f"prompts.heldout='{tmp_path / 'p.txt'}'"]
    loaded = load_with_sources([run / "config.yaml"], overrides)
    config = evaluation_config(loaded, run / "config.yaml", [], all_prompts=True).config
    assert (config.evaluation.prompts, config.evaluation.pictures) == (2, 2)
    loaded = load_with_sources([run / "config.yaml"], [*overrides, "evaluation.prompts=1"])
    assert evaluation_config(loaded, run / "config.yaml", [], all_prompts=True).config.evaluation.prompts == 1


def test_policies_are_named_by_the_user_and_ordered_by_us() -> None:
    assert policies_of("ema, base") == ("base", "ema")
    assert policies_of("default") == ("default",)
    with pytest.raises(UserError, match=r"--policies has 'best', which is no policy\. Choose from base, default, ema"):
        policies_of("base,best")


def test_the_state_is_the_newest_or_the_one_that_was_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"no checkpoint to evaluate yet; .* Wait for it, or resume"):
        state_of(run, None)
    for updates in (2, 4):
        state(updates).save(RunFolder(run).checkpoint(updates))
    assert state_of(run, None).updates == 4
    assert state_of(run, 2).updates == 2
    with pytest.raises(UserError, match=r"--updates is 3, but .* has checkpoints only after 2, 4 updates"):
        state_of(run, 3)
    (RunFolder(run).checkpoint(4) / "state.json").write_text("{}")
    assert state_of(run, None).updates == 2
    assert capsys.readouterr().err.startswith("note: the checkpoint after 4 updates is skipped: ")


def test_results_of_before_are_not_overwritten(run: Path) -> None:
    assert free_folder(run, 4) == run / "eval" / "updates-000004"
    free_folder(run, 4).mkdir(parents=True)
    assert free_folder(run, 4) == run / "eval" / "updates-000004-2"

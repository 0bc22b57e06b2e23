"""docs/results.md has the figures of the results files, and no others."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from page_speed import a_step
from page_tables import RESULTS
from results_page import BLOCK, BLOCKS, PAGE, render
from time_to_target import comparisons
from variants import TABLES

from solrl_ray.forecasts.prices import price_list

FIGURE = re.compile(r"\d+\.\d+|\d+ ?%|\d ?×")


def test_the_page_is_what_its_results_files_make_of_it() -> None:
    text = PAGE.read_text()
    assert render(text) == text, "run `make results`"
    assert set(BLOCK.findall(text)) == set(BLOCKS)


def test_no_figure_stands_outside_of_the_tables() -> None:
    prose = BLOCK.sub("", PAGE.read_text())
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)|SD3\.5|FLUX\.1|95 % interval", "", prose)
    assert FIGURE.findall(prose) == []


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("rollout_flux.json", lambda content: content.update(ratio=3.0)),
        ("rank_fidelity_published.json", lambda content: content["previews"][0].update(kendall=0.123)),
    ],
)
def test_another_result_makes_another_page(file: str, change: Any, tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(RESULTS, results)
    content = json.loads((results / file).read_text())
    change(content)
    (results / file).write_text(json.dumps(content))
    assert render(PAGE.read_text(), results) != PAGE.read_text()


def campaign(rows: tuple[str, ...]) -> dict[str, Any]:
    """A results file of `convergence.py`: two seeds a row, which gain 0.4 and 0.5 in as many iterations."""
    seeds = {
        seed: {"iterations": [0, 8], "reward": [0.4, end], "words": None} for seed, end in (("42", 0.8), ("43", 0.9))
    }
    runs, charged = dict.fromkeys(rows, seeds), {name: {"flux1_dev": 100.0} for name in rows}
    if "pool_48" in rows:
        charged["pool_48"] = {"flux1_dev": 50.0}
    return {"iterations": 8, "runs": runs, "charged": charged, "comparisons": comparisons(runs, charged)}


def test_each_table_has_its_command() -> None:
    before = 0
    for block in BLOCK.finditer(PAGE.read_text()):
        with_its_prose = PAGE.read_text()[before : block.end()]
        assert "`python benchmarks/" in with_its_prose or "`solrl eval" in with_its_prose, block[1]
        before = block.end()


def test_a_table_says_what_is_not_measured_yet(tmp_path: Path) -> None:
    unmeasured = BLOCKS["pool"](tmp_path)
    assert unmeasured.endswith(
        "Not measured yet: `python benchmarks/convergence.py --table pool --gpu --at-once 16 --seeds 3`"
    )
    (tmp_path / "convergence.json").write_text(json.dumps(campaign(TABLES["pool"])))
    assert BLOCKS["pool"](tmp_path).endswith(unmeasured.replace("Not measured yet:", "Measured by").splitlines()[-1])
    (row,) = [line for line in BLOCKS["pool"](tmp_path).splitlines() if line.startswith("| pool_48")]
    assert row.startswith("| pool_48 | 2 | 0.850 ± 0.635 | 4.0 / 6.0 / 7.2 / 8.0 | 2.00 (")
    assert row.endswith("| 0.3622 |")
    assert BLOCKS["keep"](tmp_path).startswith("Not measured yet")  # of which only the baselines are there
    (tmp_path / "convergence.json").write_text(json.dumps(campaign(("direct", "two_stage_nvfp4", "keep_8"))))
    assert "Not all measured yet" in BLOCKS["keep"](tmp_path)


def test_the_headline_compares_with_both_baselines_and_with_the_released_schedule(tmp_path: Path) -> None:
    assert BLOCKS["headline"](tmp_path).startswith("Not measured yet")
    content = campaign(("direct", "scaled", "two_stage_fp8"))
    for name, seconds in (("direct", 80.0), ("scaled", 150.0), ("two_stage_fp8", 100.0)):
        content["charged"][name] = {"flux1_dev": seconds, "sd35_large": 2 * seconds}
    content["released"] = {"flux1_dev": 120.0, "sd35_large": 100.0}
    (tmp_path / "convergence.json").write_text(json.dumps(content))
    rows = BLOCKS["headline"](tmp_path).splitlines()[-4:-2]
    told = [[cell.split()[0] for cell in row.split(" | ")[2:]] for row in rows]
    assert told == [["1.50", "1.20", "0.80"], ["1.50", "0.50", "0.80"]]  # curves are equal, so prices decide


def test_the_headline_takes_longer_runs_where_there_are_as_many(tmp_path: Path) -> None:
    content = campaign(("direct", "scaled", "two_stage_fp8"))
    content["charged"] = {name: {"flux1_dev": 100.0, "sd35_large": 100.0} for name in content["charged"]}
    content["released"] = {"flux1_dev": 100.0, "sd35_large": 100.0}
    slow = {"iterations": [0, 16], "reward": [0.0, 1.0], "words": None}
    longer: dict[str, Any] = {"iterations": 16, "runs": {"two_stage_fp8": {"42": slow}}}
    for name, made in (("convergence.json", content), ("convergence_88.json", longer)):
        (tmp_path / name).write_text(json.dumps(made))
    assert "16 iterations" not in BLOCKS["headline"](tmp_path)
    longer["runs"]["two_stage_fp8"]["43"] = slow
    (tmp_path / "convergence_88.json").write_text(json.dumps(longer))
    rows = BLOCKS["headline"](tmp_path).splitlines()[-4:-2]
    assert all(row.startswith("| two_stage_fp8, 16 iterations | ") for row in rows)
    assert "0.00–" not in rows[0]  # each draw comes to its target


def test_the_readme_quotes_the_headline() -> None:
    rows = [line.split(" | ") for line in BLOCKS["headline"](RESULTS).splitlines() if "FLUX.1-dev" in line]
    than_direct = {row[0].strip("| ").partition(",")[0]: row[-1].split()[0] for row in rows}
    readme = " ".join((PAGE.parents[1] / "README.md").read_text().split())
    assert f"of 24 of 24 [{than_direct['lean_48_keep_8']} × sooner]" in readme
    assert f"(8 of 8: {than_direct['direct_8']} ×, 24 of 96: {than_direct['two_stage_pruned']} ×)" in readme


def test_rewards_after_equal_time_follow_from_prices(tmp_path: Path) -> None:
    content = campaign(("direct", "direct_8"))
    content["charged"] = {
        "direct": {"flux1_dev": 100.0, "sd35_large": 200.0},
        "direct_8": {"flux1_dev": 25.0, "sd35_large": 100.0},
    }
    content["iterations"] = 80
    longer = {"iterations": [0, 80], "reward": [0.4, 1.2], "words": None}
    content["runs"] = {"direct": {"42": longer}, "direct_8": {"42": longer}}
    (tmp_path / "convergence.json").write_text(json.dumps(content))
    as_flux, as_sd3, *_ = BLOCKS["equal-time"](tmp_path).split("\n\n")
    direct, few = as_flux.splitlines()[2:]
    assert direct.split(" | ")[3] == "0.500"  # after 10 of 80 iterations
    assert few.split(" | ")[3:5] == ["0.800", "1.000"]  # after 40 and 60
    assert few.count("1.200") == 1  # after 80; the last three columns are later
    assert as_sd3.splitlines()[3].split(" | ")[3:5] == ["0.600", "0.700"]  # after 20 and 30


def test_a_fall_is_from_the_best_reward_so_far_also_in_a_run_that_was_cut_short(tmp_path: Path) -> None:
    assert "Not measured yet" in BLOCKS["quantized"](tmp_path)
    run = {"iterations": [0, 40, 80, 120, 124], "reward": [0.4, 0.9, 0.6, 0.8, 0.95]}
    content = {"iterations": 200, "runs": {"quantized": {"42": run}}}
    (tmp_path / "convergence_200.json").write_text(json.dumps(content))
    row = BLOCKS["quantized"](tmp_path).splitlines()[-3]
    assert row == "| quantized | 42 | 0.900 | 0.600 | 0.800 | | 0.950, after 124 | 0.300, after 80 |"


def test_the_curves_are_drawn_once_they_are_there(tmp_path: Path) -> None:
    import plots  # and Matplotlib, which takes seconds

    assert "Not measured" in BLOCKS["reward-figure"](tmp_path)
    rows = ("direct", "two_stage_nvfp4", "awm_direct")
    (tmp_path / "convergence.json").write_text(json.dumps(campaign(rows)))
    plots.reward(tmp_path, tmp_path)
    picture = tmp_path / "results_reward.png"
    assert picture.stat().st_size > 1000
    assert f"(images/{picture.name})" in BLOCKS["reward-figure"](tmp_path)


def test_a_ranking_table_is_shown_in_the_unit_of_the_paper(tmp_path: Path) -> None:
    shares = {f"{side}_beats_{k}": share for k in (4, 8, 12) for side, share in (("best", 1.0), ("worst", 0.0))}
    row = {"tier": "fp8", "steps": 4, "spearman": 0.9, "kendall": 0.8, **shares}
    (tmp_path / "rank_fidelity_published.json").write_text(json.dumps({"seeds": 50, "previews": [row]}))
    cells = " | ".join(["100.0% / 2.0%"] * 3)  # from 1 of 50 to 50 of 50
    assert f"| testbed | fp8 | 4 | 0.900 | 0.800 | {cells} |" in BLOCKS["ranking"](tmp_path).splitlines()


@pytest.mark.parametrize(
    ("file", "part", "after", "keep", "price"),
    [
        ("rollout_flux.json", "naive", 0, 0, ("flux", "bf16")),
        ("rollout_flux.json", "previews", 0, 0, ("flux", "fp8")),
        ("rollout_sd3.json", "previews", 0, 0, ("sd3", "fp8")),
        ("rollout_sd3_all_blocks.json", "naive", 0, 0, ("sd3", "bf16")),
        ("rollout_sd3_all_blocks.json", "previews, pruned after 2 to 36, micro-batch 12", 2, 36, ("sd3", "scope")),
        ("rollout_sana_all_blocks.json", "naive", 0, 0, ("sana", "bf16")),
        ("rollout_sana_all_blocks.json", "previews", 0, 0, ("sana", "scope")),
    ],
)
def test_the_prices_of_solver_steps_are_those_of_the_table(
    file: str, part: str, after: int, keep: int, price: tuple[str, str]
) -> None:
    (listed,) = (model for model in price_list("h200").models if model.family == price[0])
    figure = listed.scopes["fp8"][0] if price[1] == "scope" else listed.steps[price[1]]
    assert a_step(json.loads((RESULTS / file).read_text()), part, after, keep) == f"{figure.ms:.1f}"

"""docs/results.md has the figures of the results files, and no others."""

from __future__ import annotations

import json
import re
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


@pytest.mark.parametrize("name", sorted(BLOCKS.keys() - {"rollouts"}))  # which has a row for each results file
def test_a_block_without_results_says_so(name: str, tmp_path: Path) -> None:
    assert re.search("Not (measured|planned) yet: `", BLOCKS[name](tmp_path))


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


def test_gains_of_two_rewards_stand_side_by_side_with_their_errors_over_seeds(tmp_path: Path) -> None:
    seeds = {"42": {"clip": 0.1, "red": 3.0}, "43": {"clip": 0.3, "red": 5.0}}
    gains = {"summed": seeds, "own statistics": {"42": {"clip": 0.5, "red": 1.0}}}
    (tmp_path / "own_statistics.json").write_text(json.dumps({"iterations": 12, "gains": gains}))
    header, _, *rows = BLOCKS["own-statistics"](tmp_path).splitlines()[:4]
    assert header == "| held-out gain after 12 iterations | seeds | clip | red |"
    # Standard error of two: half of their difference.
    assert rows == [
        "| summed | 2 | +0.2000 ± 0.1000 | +4.0000 ± 1.0000 |",
        "| own statistics | 1 | +0.5000 | +1.0000 |",
    ]


def test_the_readme_quotes_the_headline() -> None:
    rows = [line.split(" | ") for line in BLOCKS["headline"](RESULTS).splitlines() if "FLUX.1-dev" in line]
    than_direct = {row[0].strip("| ").partition(",")[0]: row[-1].split()[0] for row in rows}
    readme = " ".join((PAGE.parents[1] / "README.md").read_text().split())
    assert f"of 24 of 24 [{than_direct['lean_48_keep_8']} × sooner]" in readme
    assert f"(8 of 8: {than_direct['direct_8']} ×, 24 of 96: {than_direct['two_stage_pruned']} ×)" in readme


def test_the_curves_are_drawn_once_they_are_there(tmp_path: Path) -> None:
    import plots  # and Matplotlib, which takes seconds

    assert "Not measured" in BLOCKS["reward-figure"](tmp_path)
    rows = ("direct", "two_stage_nvfp4", "awm_direct")
    (tmp_path / "convergence.json").write_text(json.dumps(campaign(rows)))
    plots.reward(tmp_path, tmp_path)
    picture = tmp_path / "results_reward.png"
    assert picture.stat().st_size > 1000
    assert f"(images/{picture.name})" in BLOCKS["reward-figure"](tmp_path)


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

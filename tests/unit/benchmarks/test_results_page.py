"""The pages of docs/results have the figures of the results files, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from page_speed import a_step, gpus
from page_tables import RESULTS
from results_page import BLOCK, BLOCKS, KEPT, PAGES, ROOT, render
from shape_results import HEADLINE, REFERENCE, SEEDS, SHAPES, Shape, summary

from solrl_ray.planning.prices import price_list

FIGURE = re.compile(r"\d+\.\d+|\d+ ?%|\d ?×")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_is_what_its_results_files_make_of_it(page: Path) -> None:
    text = page.read_text()
    assert render(text) == text, "run `make results`"


def test_every_table_is_on_a_page() -> None:
    shown = [name for page in PAGES for name in BLOCK.findall(page.read_text()) if not name.startswith(KEPT)]
    assert sorted(shown) == sorted(BLOCKS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_figure_stands_outside_of_the_tables(page: Path) -> None:
    prose = BLOCK.sub("", page.read_text())
    names = r"`[^`]*`|\]\([^)]*\)|[A-Z][\w-]* ?\d+\.\d+|\d\.\dB|95 % interval"
    assert FIGURE.findall(re.sub(names, "", prose)) == []


TWO, ONE = "1x3_4of48", "2x1_8of8"


def run(*reward: float, ended: str = "limit") -> dict[str, Any]:
    return {"iterations": [10 * n for n in range(len(reward))], "reward": list(reward), "ended": ended}


@pytest.fixture
def complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results of all stages: an iteration in two stages is charged 30 s, in one 100 s. To 90 % (a reward of 0.9) two
    stages need 20 to 24 iterations, one stage 20, 24 of 24 needs 40.
    """
    monkeypatch.setattr(Shape, "charged", lambda self, place: 30.0 if self.pool else 100.0)
    ends = {str(seed): 0.9 - 0.02 * place for place, seed in enumerate(SEEDS)}
    two = {seed: run(0.45, 0.7, end, 0.95) for seed, end in ends.items()}
    one = {str(seed): run(0.45, 0.75, 0.9) for seed in SEEDS}
    slow = {str(seed): run(0.45, 0.5, 0.6, 0.7, 0.9) for seed in SEEDS}
    lucky = {"42": run(0.45, 0.95)}
    runs = {TWO: two, ONE: one, REFERENCE: slow, "1x1_8of96": lucky, f"{TWO}+kl_0": slow}
    results: dict[str, Any] = {"runs": {name: {"0.001": of_seed} for name, of_seed in runs.items()}}
    (tmp_path / "shapes.json").write_text(json.dumps(results | summary(results)))
    return tmp_path


def rows(block: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_table_has_its_command_or_the_commit_that_has_its_script(page: Path) -> None:
    text, before = page.read_text(), 0
    for block in BLOCK.finditer(text):
        commit = re.search(r"[Ss]cript:\s`benchmarks/\w+\.py`\s+at\s[0-9a-f]{8}\b", block[0])
        assert commit or "`python benchmarks/" in text[before : block.end()], block[1]
        before = block.end()


@pytest.mark.parametrize("name", sorted(BLOCKS.keys() - {"rollouts"}))  # which has a row for each results file
def test_a_block_without_results_says_so(name: str, tmp_path: Path) -> None:
    assert re.search("Not (measured|planned) yet: `", BLOCKS[name](tmp_path))


def test_a_model_without_prices_has_its_row_without_a_plan(tmp_path: Path) -> None:
    rows = json.loads((RESULTS / "many_gpus.json").read_text())
    (kontext,) = (row for row in rows if row["model"] == "flux_kontext")
    (tmp_path / "many_gpus.json").write_text(json.dumps([kontext | {"model": "wan", "planned": {}}]))
    (row,) = (line for line in gpus(tmp_path).splitlines() if "Wan 2.1" in line)
    assert "| **114.1** | – | 55 | – |" in row


def test_the_best_of_both_sides_are_compared_at_each_share_by_shapes_of_most_seeds(complete: Path) -> None:
    _, _, *shares = rows(BLOCKS["headline"](complete))
    of = {cells[0]: cells[1:] for cells in shares}
    # Iterations to 0.9: 20 + 10 × (0.9 - end) / (0.95 - end) of two stages, whose shape with one seed does not count.
    took = [20 + 10 * gap / (gap + 0.05) for gap in (0.0, 0.02, 0.04, 0.06, 0.08)]
    mean = 30 * sum(took) / 5
    assert of["90%"][0] == f"{mean:,.0f}: 4 of 48, 1 prompt × 3 steps, lr 0.001"
    assert of["90%"][1] == "2,000: 8 of 8, 2 prompts, lr 0.001"
    assert of["90%"][2].startswith(f"{2000 / mean:.2f}× (")
    assert of["95%"][1:] == ["–", "–"]
    text = f"closes 90% after 4,000 s; the best two-stage setting is {4000 / mean:.2f}× ("
    assert text in BLOCKS["headline"](complete)


def test_the_best_of_a_side_may_have_an_option(complete: Path) -> None:
    content = json.loads((complete / "shapes.json").read_text())
    content["runs"][f"{TWO}+kl_0"]["0.001"] = {str(seed): run(0.45, 0.9, 0.93, 0.89) for seed in SEEDS}
    (complete / "shapes.json").write_text(json.dumps(content | summary(content)))
    assert rows(BLOCKS["headline"](complete))[3][1] == "300: 4 of 48, 1 prompt × 3 steps, `kl_0`, lr 0.001"


def test_the_shape_of_the_default_stands_beside_the_best_of_one_stage(complete: Path) -> None:
    content = json.loads((complete / "shapes.json").read_text())
    content["runs"]["1x3_4of24+shared_noise"] = {"0.001": {str(seed): run(0.45, 0.9) for seed in SEEDS}}
    (complete / "shapes.json").write_text(json.dumps(content | summary(content)))
    assert "after 300 s, 6.67× (6.67–6.67) faster than the best one-stage" in BLOCKS["headline"](complete)


def test_one_seed_has_no_interval_and_a_shape_that_is_not_there_a_bound(complete: Path) -> None:
    content = json.loads((complete / "shapes.json").read_text())
    content["runs"] = {
        TWO: {"0.001": {"42": run(0.45, 0.9)}},  # after 300 s
        ONE: {"0.001": {"42": run(0.45, 0.9)}},
        REFERENCE: {"0.001": {"42": run(0.45, 0.6, 0.7, ended="")}},
    }
    (complete / "shapes.json").write_text(json.dumps(content | summary(content)))
    shown = BLOCKS["headline"](complete)
    assert rows(shown)[3][3] == "3.33× (one seed)"


@pytest.mark.parametrize("name", ["1x3_4of48", "2x3_8of8", REFERENCE])
def test_the_seconds_of_the_map_are_by_the_prices_of_today(name: str) -> None:
    """Else `python benchmarks/shapes.py --show` makes them again."""
    stored = json.loads((RESULTS / "shapes.json").read_text())["charged"][name]
    assert stored[HEADLINE] == pytest.approx(SHAPES[name].charged(HEADLINE))


def test_the_readme_quotes_the_headline() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    shares = {cells[0]: cells[-1].partition(" (")[0] for cells in rows(BLOCKS["headline"](RESULTS))[2:]}
    assert f"[{shares['90%']} faster](docs/results/quality.md#two-stages-vs-one-stage)" in readme
    content = json.loads((RESULTS / "shapes.json").read_text())
    assert shares["90%"].removeprefix("at least ") == f"{content['two_stage_over_one_stage'][0]:.2f}×"


def test_the_settings_are_drawn(complete: Path) -> None:
    import plots  # and Matplotlib, which takes seconds

    plots.shapes(complete, complete)
    assert (complete / "results_shapes.png").stat().st_size > 1000
    assert "(../images/results_shapes.png)" in BLOCKS["shapes-figure"](complete)


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

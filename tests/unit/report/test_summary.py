"""The numbers a run comes to, against values worked by hand."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from solrl_ray.common.checked_json import with_checksum
from solrl_ray.errors import UserError
from solrl_ray.evaluation.paired_gain import paired_gain
from solrl_ray.report.data import read_summary
from solrl_ray.report.summary import (
    Summary,
    gap_closed,
    run_selection_digest,
    summarize,
    write_summary,
)
from tests.support.made_runs import BASE, FINAL, config, evaluation, evaluations, iteration


def made_summary() -> Summary:
    return summarize(config(), [iteration(n) for n in range(3)], evaluations(), seconds=36.5)


def test_the_standard_error_is_that_of_per_prompt_mean_differences() -> None:
    # Means per prompt: base .2 .2 .6, final .4 .3 .75; differences .2 .1 .15, mean .15.
    # Deviations .05 -.05 0: variance (.0025 + .0025) / 2 = .0025; standard error sqrt(.0025 / 3) = .0288675.
    gain = paired_gain(evaluation(0, "base", BASE), evaluation(3, "ema", FINAL))
    assert gain.differences == pytest.approx({"aa": 0.2, "bb": 0.1, "cc": 0.15})
    assert gain.mean == pytest.approx(0.15)
    assert gain.stderr == pytest.approx(0.028867513459481287)


def test_a_single_prompt_has_no_standard_error() -> None:
    gain = paired_gain(evaluation(0, "base", {"aa": (0.1, 0.3)}), evaluation(1, "ema", {"aa": (0.5, 0.5)}))
    assert gain.mean == pytest.approx(0.3)
    assert gain.stderr is None


@pytest.mark.parametrize(
    ("base", "final", "real", "expected"),
    [(0.2, 0.3, 0.7, 0.2), (0.2, 0.1, 0.7, -0.2), (0.2, 0.3, None, None), (0.5, 0.6, 0.4, None)],
)
def test_the_gap_is_the_way_from_base_to_real(
    base: float, final: float, real: float | None, expected: float | None
) -> None:
    assert gap_closed(base, final, real) == (None if expected is None else pytest.approx(expected))


def test_a_summary_holds_the_numbers_of_the_run() -> None:
    # Base mean (.2 + .2 + .6) / 3 = 1/3; final (.4 + .3 + .75) / 3 = 29/60; real .9: gap .15 / (17/30).
    summary = made_summary()
    assert summary.reward_base == pytest.approx(1 / 3)
    assert summary.reward_final == pytest.approx(29 / 60)
    assert summary.reward_real == pytest.approx(0.9)
    assert summary.reward_gain_stderr == pytest.approx(0.028867513459481287)
    assert summary.gap_closed == pytest.approx(0.15 * 30 / 17)
    assert (summary.iterations, summary.seconds) == (3, 36.5)
    assert (summary.candidates, summary.samples) == (864, 288)
    assert (summary.requeued_units, summary.duplicate_results) == (1, 0)
    assert (summary.heldout_prompts, summary.heldout_samples, summary.prompts_improved) == (3, 2, 3)
    assert summary.spearman_mean == pytest.approx(0.91)
    assert summary.lora_digest == "lora-2"


def test_the_newest_evaluation_of_the_trained_policy_is_final() -> None:
    early = evaluation(1, "ema", {key: (0.0, 0.0) for key in BASE})
    summary = summarize(config(), [iteration(n) for n in range(3)], [*evaluations(), early], seconds=1.0)
    assert summary.reward_final == pytest.approx(29 / 60)


def test_the_selection_digest_covers_every_iteration_in_order() -> None:
    expected = hashlib.sha256(b"selection-0\nselection-1\n").hexdigest()
    assert run_selection_digest([iteration(1), iteration(0)]) == expected
    other = replace(iteration(0), selection_digest="another")
    assert run_selection_digest([other, iteration(1)]) != expected


def test_undefined_rank_correlations_are_left_out_of_their_mean() -> None:
    records = [replace(iteration(0), spearman=math.nan), iteration(2)]
    assert summarize(config(), records, evaluations(), seconds=1.0).spearman_mean == pytest.approx(0.92)


def test_the_file_has_the_published_keys_and_reads_back(tmp_path: Path) -> None:
    summary = made_summary()
    path = write_summary(tmp_path, summary)
    values = json.loads(path.read_text())
    assert path.name == "summary.json"
    assert {
        "reward_base",
        "reward_final",
        "reward_real",
        "reward_gain_stderr",
        "seconds",
        "iterations",
        "selection_digest",
        "lora_digest",
    } <= values.keys()
    assert read_summary(tmp_path) == summary
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_constant_rewards_are_a_warning_of_the_whole_run() -> None:
    assert made_summary().warnings == []
    measured = [replace(iteration(n), constant_groups=n) for n in range(3)]
    (warning,) = summarize(config(), measured, evaluations(), seconds=36.5).warnings
    assert warning.startswith(
        "Constant reward: rewards.0 (clipscore) was the same for all samples of a prompt in 3 of 36 "
    )


def test_a_missing_or_damaged_summary_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no summary\.json"):
        read_summary(tmp_path)
    (tmp_path / "summary.json").write_text('{"run": "half')
    with pytest.raises(UserError, match=r"summary\.json"):
        read_summary(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps(with_checksum({"run": "of another version"})))
    with pytest.raises(UserError, match=r"summary\.json .*Summary\.iterations"):
        read_summary(tmp_path)

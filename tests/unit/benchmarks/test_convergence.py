"""Every variant of the campaigns can be run, on CPUs and with everybody on one GPU, and has a price."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import convergence
import pytest
from variants import DIRECTS, VARIANTS

from solrl_ray.config.strategies import pool_sampling


def arguments(gpu: bool = False) -> argparse.Namespace:
    return argparse.Namespace(root=Path("runs"), iterations=40, gpu=gpu, set=[])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_a_valid_run(name: str) -> None:
    for gpu in (False, True):
        config = convergence.job(name, 43, arguments(gpu)).config
        assert (config.run.name, config.run.seed, config.objective.kind) == (f"{name}-43", 43, VARIANTS[name].method)
        assert bool(config.fleet.explorers.num_gpus) == gpu
        assert (config.rollout.strategy == "direct") == (name in DIRECTS.values() or name.startswith("direct_"))
        pruned = name in ("two_stage_pruned", "two_updates") or name.startswith(("prune_", "lean_"))
        assert bool(pool_sampling(config).pruning) == pruned
        assert config.rollout.keep % config.rollout.regenerate.micro_batch == 0  # nothing padded is charged


@pytest.mark.parametrize("name", ["direct", "quantized", "two_stage_pruned", "lean_48_keep_8", "two_updates"])
def test_the_results_files_prices_are_those_of_the_present_code(name: str) -> None:
    """Else `convergence.py` would put new prices beside old ones: with `--seconds 0` it makes them again."""
    stored = json.loads(convergence.RESULTS.read_text())["charged"][name]
    assert convergence.charged(name, arguments()) == pytest.approx(stored)


def test_the_released_schedule_of_direct_costs_more_than_ours() -> None:
    ours, released = convergence.charged("direct", arguments()), convergence.released(arguments())
    assert all(1.3 < released[model] / ours[model] < 2 for model in convergence.MODELS)


def test_exploring_ahead_costs_as_much_of_one_card_and_pruning_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(convergence.MODELS, "sd35_large")
    few = argparse.Namespace(set=["rollout.prompts=1"])
    plain, ahead, pruned = (
        convergence.charged(name, few)["flux1_dev"] for name in ("two_stage_nvfp4", "staleness_1", "two_stage_pruned")
    )
    assert ahead == pytest.approx(plain)
    assert pruned < 0.95 * plain


def test_runs_of_another_length_are_not_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"iterations": 40, "runs": {}, "charged": {}}))
    monkeypatch.setattr(sys, "argv", ["convergence.py", "--iterations", "200", "--results", str(results)])
    with pytest.raises(SystemExit, match=r"^--iterations is 200, but .* holds runs of 40; name another file"):
        convergence.main()


def test_what_the_results_file_has_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {"iterations": [0, 4], "reward": [0.25, 0.5], "words": None}
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"iterations": 4, "runs": {"direct": {"42": run}}, "charged": {}}))
    given = ["--only", "direct", "--seeds", "1", "--iterations", "4", "--results", str(results)]
    monkeypatch.setattr(sys, "argv", ["convergence.py", *given, "--root", str(tmp_path / "runs")])
    convergence.main()
    assert "| direct | 1 | 0.500 | – | 2.0 / 3.0 / 3.6 / 4.0 | 1.00 / 1.00 / 1.00 / 1.00 |" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
    shorter = argparse.Namespace(iterations=8, judge=False)
    assert not convergence.is_whole(run, shorter)
    assert not convergence.is_whole(run, argparse.Namespace(iterations=4, judge=True))


def test_a_run_that_was_cut_short_is_kept_and_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {"iterations": [0, 4, 8], "reward": [0.25, 0.5, 0.75], "words": None}
    short = {"iterations": [0, 4], "reward": [0.25, 0.5], "words": None}
    results = tmp_path / "results.json"
    runs = {"direct": {"42": whole, "43": short}, "two_stage_fp8": {"42": short}}
    results.write_text(json.dumps({"iterations": 8, "runs": runs, "charged": {}}))
    given = ["--only", "direct", "two_stage_fp8", "--seeds", "2", "--iterations", "8", "--results", str(results)]
    stopped = ["--seconds", "0", "--root", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["convergence.py", *given, *stopped])
    convergence.main()
    printed = capsys.readouterr().out
    assert "| direct | 1 | 0.750 | – | 4.0 / 6.0 / 7.2 / 8.0 | 1.00 / 1.00 / 1.00 / 1.00 |" in printed
    assert "| two_stage_fp8 |" not in printed
    assert "Not compared: 2 of the file's runs, cut short before iteration 8." in printed
    assert json.loads(results.read_text())["runs"] == runs

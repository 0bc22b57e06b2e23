"""``report.html``: a self-contained HTML page about a run, made only from the files of its run folder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from solrl_ray.config import selection_rules
from solrl_ray.config.problems import counted
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import is_one_stage, pool_sampling
from solrl_ray.evaluation import stability
from solrl_ray.metrics.records import added
from solrl_ray.models import paths
from solrl_ray.models.stock_call import StockCall
from solrl_ray.report import plots, tables
from solrl_ray.report.curve import Curve
from solrl_ray.report.data import RunData, read_run
from solrl_ray.report.pictures import Gallery
from solrl_ray.report.rendering import digits, write_page
from solrl_ray.report.summary import all_warnings, finite_mean, gap_closed, run_selection_digest

REPORT_FILE = "report.html"
EVENTS = 100
"""Number of newest events that the page lists."""


def build(run_folder: Path) -> Path:
    """Write ``report.html`` into the folder of a run, finished or not; returns its path.

    The page needs no network and no JavaScript: styles and plots are inline, images are data URIs.

    Raises UserError if `run_folder` is not the folder of a run that has begun, or if one of its files is damaged.
    """
    data = read_run(Path(run_folder))
    path = data.folder / REPORT_FILE
    write_page(path, "report.html", **_values(data))
    return path


def _values(data: RunData) -> dict[str, Any]:
    config, iterations = data.config, data.iterations
    base, final, real = (data.shown.get(name) for name in ("base", "final", "real"))
    gain = data.gain
    closed = base and final and real and gap_closed(base.reward_mean, final.reward_mean, real.reward_mean)
    curve, devices = Curve.of(data), sorted({one.device for one in data.attestations})
    devices += [counted(curve.gpus, "GPU")] if devices and curve.gpus else []
    versions = data.summary.versions if data.summary else {}
    return {
        "run": data,
        "name": config.run.name,
        "line": _line(config),
        "starts": data.starts,
        "devices": ", ".join(devices),
        "base_model": str(paths.resolve(config.model.path)),
        "dtype": config.model.dtype,
        "on_gpu": config.fleet.learners.num_gpus > 0,
        "drawing": StockCall.of(config),
        "lora": (data.folder / "lora").is_dir(),
        "best": _best(data),
        "config_text": data.config_text.rstrip(),
        "planned": config.run.iterations,
        "strategy": config.rollout.strategy,
        "one_stage": is_one_stage(config),
        "wanted": pool_sampling(config).tier,
        "pruned": pool_sampling(config).pruning is not None,
        "warnings": all_warnings(config, iterations, data.evaluations),
        "base": base,
        "final": final,
        "real": real,
        "gain": gain,
        "closed": closed,
        "gallery": Gallery.of_run(data),
        "plots": _drawn(data, curve),
        "spearman": finite_mean([record.spearman for record in iterations]),
        "workers": tables.worker_times(config, iterations),
        "stages": tables.stages(data),
        "inside": sum(record.seconds["total"] for record in iterations),
        "evaluating": sum(record.seconds for record in data.evaluations if not record.overlapped),
        "clipped": finite_mean([record.clip_fraction for record in iterations]),
        "reward_costs": added([i.reward_costs for i in iterations] + [e.reward_costs for e in data.evaluations]),
        "event_counts": Counter(event.kind for event in data.events),
        "events": data.events[-EVENTS:],
        "differing": [
            record.iteration
            for record in iterations
            if (record.candidates, record.dropped, record.samples)
            != (record.expected_candidates, record.expected_dropped, record.expected_samples)
        ],
        "attested": tables.attested(data),
        "tiers": tables.TIERS,
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "selection_digest": data.summary.selection_digest if data.summary else run_selection_digest(iterations),
    }


def _line(config: Config) -> str:
    """Model, reward, rollout, sampling and seed in one line."""
    rollout, pool = config.rollout, pool_sampling(config)
    rewards = " + ".join(reward.kind for reward in config.rewards)
    chosen = selection_rules.describe(rollout.selection, rollout.keep, rollout.pool)
    sampled = f"samples: {rollout.regenerate.steps} steps in {pool.tier}"
    if not is_one_stage(config):
        samples = f"samples: {rollout.regenerate.steps} steps in {config.model.dtype}"
        pruned = f", {pool.kept} of {pool.pool} continued after step {pool.pruning.after}" if pool.pruning else ""
        sampled = f"previews: {pool.steps} steps in {pool.tier}{pruned} · {samples}"
    return (
        f"{config.model.path} · reward {rewards} · rollout {rollout.strategy}: {rollout.prompts} prompts per iteration"
        f", {chosen} · {sampled} · {_guidance(config)}run seed {config.run.seed}"
    )


def _guidance(config: Config) -> str:
    samples, evaluations = config.model.describe_guidance(), config.evaluated_model.describe_guidance()
    other = f" (evaluations: {evaluations or 'none'})" if evaluations != samples else ""
    return f"guidance {samples or 'none'}{other} · " if samples or evaluations else ""


def _best(data: RunData) -> str:
    """A sentence about ``lora_best``, if the best evaluated policy is not the last one; else empty."""
    top, final = stability.best(data.evaluations, trained=True), data.shown.get("final")
    if top is None or top is final or not (data.folder / "lora_best").is_dir():
        return ""
    return (
        f"The folder lora_best has the best evaluated policy, after {counted(top.iteration, 'update')}: "
        f"held-out reward {digits(top.reward_mean)} ± {digits(top.reward_stderr)}."
    )


def _drawn(data: RunData, curve: Curve) -> dict[str, str]:
    """Name → SVG of each plot for which the run has data."""
    drawn, gain = {}, data.gain
    if curve.points:
        real = data.shown.get("real")
        drawn["heldout"] = plots.heldout_reward(curve, real.reward_mean if real else None)
    if gain is not None and len(gain.differences) > 1:
        drawn["gains"] = plots.prompt_gains(gain)
    if data.iterations:
        previews = not is_one_stage(data.config)
        drawn["training"] = plots.training_reward(data.iterations, previews=previews)
        drawn["loss"] = plots.loss(data.iterations)
        if previews:
            drawn["fidelity"] = plots.rank_fidelity(data.iterations)
    return drawn

"""The report: one self-contained HTML page, made from the files of a run folder and nothing else."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from string import Template

from solrl_ray.common.files import replace_file
from solrl_ray.config.strategies import is_one_stage, pool_sampling, warnings
from solrl_ray.report import plots, tables
from solrl_ray.report.data import RunData, read_run
from solrl_ray.report.markup import card, digits, element, escape, figure, signed
from solrl_ray.report.pictures import picture_grid, picture_layout
from solrl_ray.report.summary import (
    PairedGain,
    find_evaluation,
    finite_mean,
    gap_closed,
    paired_gain,
)
from solrl_ray.report.timing import worker_times

REPORT_FILE = "report.html"
_TRAINED_ON = {
    "direct": "Trained on: every seed of the pool.",
    "scaled": "Trained on: the best and worst of each pool, which is another level than the mean of a policy.",
    "quantized": "Trained on: the best and worst of each pool, as sampled in low precision.",
    "two_stage": "Trained on: the best and worst of each pool, regenerated in full precision, which is another level "
    "than the mean of a policy.",
}


def build(run_folder: Path) -> Path:
    """Writes ``report.html`` into a run folder, finished or not; returns its path.

    The page needs no network and no JavaScript: styles and plots are inline, pictures are data URIs.

    Raises:
        UserError: `run_folder` is not the folder of a run that has begun, or one of its files is damaged.
    """
    data = read_run(Path(run_folder))
    template = Template(files("solrl_ray.report").joinpath("page.html").read_text(encoding="utf-8"))
    page = template.substitute(
        title=escape(f"{data.config.run.name}: report"), body=_body(data), **picture_layout(data)
    )
    path = data.folder / REPORT_FILE
    replace_file(path, page.encode("utf-8"))
    return path


def heldout_gain(data: RunData) -> PairedGain | None:
    """Paired gain of the newest evaluated policy over the base, or None before both are there."""
    base, final = find_evaluation(data.evaluations, "base"), find_evaluation(data.evaluations, "ema")
    return None if base is None or final is None else paired_gain(base, final)


def _body(data: RunData) -> str:
    gain = heldout_gain(data)
    sections = [
        _header(data),
        *(element("p", f'<span class="chip warn">warning</span> {escape(text)}') for text in warnings(data.config)),
        _cards(data, gain),
        picture_grid(data),
        _rewards(data, gain),
        _training(data),
        _fidelity(data),
        _time(data),
        tables.counts(data),
        tables.precision(data),
        tables.identity(data),
        tables.configuration(data),
        element(
            "footer",
            f"Written by solrl_ray from {escape(data.folder.name)}/. Self-contained: can be sent as it is.",
        ),
    ]
    return "\n".join(section for section in sections if section)


def _header(data: RunData) -> str:
    config, done = data.config, len(data.iterations)
    if data.finished:
        chip = '<span class="chip good">finished</span>'
    else:
        state = f"not finished: {done} of {config.run.iterations} iterations so far"
        chip = f'<span class="chip warn">{state}</span>'
    rollout = config.rollout
    rewards = " + ".join(reward.kind for reward in config.rewards)
    pool = pool_sampling(config)
    if rollout.strategy == "direct":
        chosen = f"all of {rollout.pool} seeds"
    else:
        chosen = f"{rollout.keep // 2} best and {rollout.keep // 2} worst of {rollout.pool} seeds"
    sampled = f"samples {rollout.regenerate.steps} steps in {pool.tier}"
    if not is_one_stage(config):
        samples = f"samples {rollout.regenerate.steps} steps in {config.model.dtype}"
        sampled = f"previews {pool.steps} steps in {pool.tier}, {samples}"
    line = (
        f"{config.model.path} · reward {rewards} · rollout {rollout.strategy}: {rollout.prompts} prompts an iteration, "
        f"{chosen} · {sampled} · run seed {config.run.seed}"
    )
    return f"<header><h1>{escape(config.run.name)}</h1>{chip}<p>{escape(line)}</p></header>"


def _cards(data: RunData, gain: PairedGain | None) -> str:
    cards = [_reward_card(data, gain), _gap_card(data), _seconds_card(data)]
    spearman = finite_mean([record.spearman for record in data.iterations])
    if spearman is not None:
        latest = data.iterations[-1].spearman
        more = f"mean Spearman of preview and full reward; last {'–' if latest is None else f'{latest:.3f}'}"
        cards.append(card("Rank fidelity", f"{spearman:.3f}", more))
    return f'<div class="cards">{"".join(cards)}</div>'


def _reward_card(data: RunData, gain: PairedGain | None) -> str:
    base, final = find_evaluation(data.evaluations, "base"), find_evaluation(data.evaluations, "ema")
    if base is not None and final is not None and gain is not None:
        value = f"{digits(base.reward_mean)} → {digits(final.reward_mean)}"
        if gain.stderr is None:
            return card("Held-out reward", value, f"{signed(gain.mean)} on a single prompt")
        more = f"{signed(gain.mean)} ± {digits(gain.stderr)}, paired over {len(gain.differences)} prompts"
        return card("Held-out reward", value, more)
    if base is not None:
        more = f"base, ± {digits(base.reward_stderr)}; trained policy not evaluated yet"
        return card("Held-out reward", digits(base.reward_mean), more)
    return card("Held-out reward", "–", "not evaluated yet")


def _gap_card(data: RunData) -> str:
    base, real = find_evaluation(data.evaluations, "base"), find_evaluation(data.evaluations, "real")
    final = find_evaluation(data.evaluations, "ema")
    if base is None or final is None or real is None:
        return ""
    closed = gap_closed(base.reward_mean, final.reward_mean, real.reward_mean)
    more = f"real pictures score {digits(real.reward_mean)}"
    return card("Gap to real pictures closed", "–" if closed is None else f"{100 * closed:.1f} %", more)


def _seconds_card(data: RunData) -> str:
    inside = sum(record.seconds["total"] for record in data.iterations)
    count = len(data.iterations)
    pace = f"{count} iterations, {inside / count:.1f} s each" if count else "no iteration ended yet"
    if data.summary is None:
        return card("Time in iterations", tables.clock(inside), pace)
    return card("Wall time", tables.clock(data.summary.seconds), pace)


def _rewards(data: RunData, gain: PairedGain | None) -> str:
    drawn = []
    if any(record.policy in ("base", "ema") for record in data.evaluations):
        note = "Fixed prompts and seeds that training never sees; bars are one standard error over prompts."
        drawn.append(figure("Over policy updates", plots.heldout_reward(data.evaluations), note))
    if gain is not None and len(gain.differences) > 1:
        gained = sum(value > 0 for value in gain.differences.values())
        note = (
            f"{gained} of {len(gain.differences)} prompts gained. "
            "The standard error of the mean of these differences is the ± above."
        )
        drawn.append(figure("Gain by prompt", plots.prompt_gains(gain), note))
    if not drawn:
        return '<h2>Held-out reward</h2><p class="note">Not evaluated on held-out prompts yet.</p>'
    return f'<h2>Held-out reward</h2><div class="figures">{"".join(drawn)}</div>'


def _fidelity(data: RunData) -> str:
    if not data.iterations:
        return ""
    if is_one_stage(data.config):
        note = (
            f"Not measured: rollout strategy {data.config.rollout.strategy} has no previews. Each pool is ranked by "
            "the rewards of the very samples that are learned from."
        )
        return f'<h2>Rank fidelity</h2><p class="note">{escape(note)}</p>'
    note = (
        "Do cheap previews order the seeds as full-precision samples do? Correlations are means over prompts "
        "on the regenerated seeds; “same half” is the share of seeds that fall in the same half, better or "
        "worse, under both rewards (chance: 0.5)."
    )
    if any(record.audit for record in data.iterations):
        note += (
            " “Whole pools” are estimates from a few unselected seeds that were regenerated as well, with a 95 % "
            "interval over the audited prompts of an iteration; “best beat” is the share of its pool that a seed "
            "chosen as best truly beats, “regret” the reward contrast lost by choosing with previews."
        )
    plot = figure("Preview against full-precision reward", plots.rank_fidelity(data.iterations), "")
    table = f'<div class="card scroll top"><h3>In numbers</h3>{tables.fidelity(data)}</div>'
    ladder = tables.fallback_levels(data)
    return f'<h2>Rank fidelity</h2><p class="note">{note}</p><div class="figures">{plot}{table}{ladder}</div>'


def _time(data: RunData) -> str:
    if not data.iterations:
        return ""
    times = worker_times(data.config, data.iterations)
    note = "Exploration and regeneration overlap; “rest” is what no stage accounts for: waiting, messages."
    stages = figure("Wall time of each iteration", plots.stage_time(data.iterations), note)
    note = "Idle: the workers of a kind had nothing to compute, because others worked or they waited."
    workers = figure("Busy and idle workers", plots.worker_time(times), note)
    table = f'<div class="card scroll">{tables.stage_times(data, times)}</div>'
    return f'<h2>Where the time went</h2><div class="figures">{stages}{workers}</div><p></p>{table}'


def _training(data: RunData) -> str:
    if not data.iterations:
        return '<h2>Training</h2><p class="note">No iteration has ended yet.</p>'
    note = f"{_TRAINED_ON[data.config.rollout.strategy]} On prompts that change: a noisier curve than held out."
    one_stage = is_one_stage(data.config)
    reward = figure("Training reward", plots.training_reward(data.iterations, previews=not one_stage), note)
    distance, gradient = plots.learning_signals(data.iterations)
    note = "Mean squared difference between the velocities of the trained and the reference policy."
    figures = reward + figure("Distance to the reference policy", distance, note)
    figures += figure("Gradient norm", gradient, "Before clipping, over all LoRA factors.")
    return f'<h2>Training</h2><div class="figures three">{figures}</div>'

"""Results of ``solrl eval``: policies × rewards, as JSON, as a text table and as an HTML page with images."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from solrl_ray.common.files import replace_file
from solrl_ray.common.output import plain_table
from solrl_ray.config.problems import counted
from solrl_ray.config.schema import Config
from solrl_ray.evaluation.paired_gain import paired_gain
from solrl_ray.metrics.records import EvaluationMetrics
from solrl_ray.records import Prompt
from solrl_ray.report.grids import REFERENCE, picture_paths
from solrl_ray.report.pictures import LOSSLESS, Gallery
from solrl_ray.report.rendering import digits, signed, write_page

JSON_FILE, TEXT_FILE, PAGE_FILE = "evaluation.json", "evaluation.txt", "evaluation.html"
BASE = "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Result of one policy under one reward, over held-out prompts."""

    policy: str
    reward: str
    mean: float
    """Mean over prompts of each prompt's mean reward."""
    stderr: float
    """Standard error of `mean` over prompts."""
    gain: float | None
    """Mean difference to the base at the same addresses; None for the base, or if the base was not evaluated."""
    gain_stderr: float | None
    """Standard error of `gain` over prompts; None with a single prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All results of one ``solrl eval``."""

    run: str
    """Name of the run."""
    updates: int
    """Number of updates of the evaluated state."""
    settings: dict[str, Any]
    """Settings that determine the samples: prompts, number of samples, steps, solver, run seed and guidance."""
    policies: tuple[str, ...]
    rewards: tuple[str, ...]
    cells: tuple[Cell, ...]
    """One per policy and reward: ordered by policy, then reward."""
    scores: dict[str, dict[str, dict[str, tuple[float, ...]]]]
    """Policy → reward → prompt id → one score per address."""
    captions: dict[str, str]
    """Prompt id → text."""

    @classmethod
    def of(
        cls,
        config: Config,
        results: Mapping[str, Mapping[str, EvaluationMetrics]],
        prompts: Sequence[Prompt],
        *,
        updates: int,
    ) -> Comparison:
        """Compare results, given as policy → reward → evaluation."""
        base = results.get(BASE)
        cells = []
        for policy, columns in results.items():
            for reward, evaluation in columns.items():
                gain = paired_gain(base[reward], evaluation) if base is not None and policy != BASE else None
                cells.append(
                    Cell(
                        policy=policy,
                        reward=reward,
                        mean=evaluation.reward_mean,
                        stderr=evaluation.reward_stderr,
                        gain=gain.mean if gain else None,
                        gain_stderr=gain.stderr if gain else None,
                    )
                )
        guidance = config.evaluated_model.describe_guidance()
        return cls(
            run=config.run.name,
            updates=updates,
            settings={
                "prompts": config.prompts.heldout,
                "prompt_count": len(prompts),
                "samples": config.evaluation.samples,
                "steps": config.evaluation.steps,
                "solver": config.rollout.solver,
                "seed": config.run.seed,
                **({"guidance": guidance} if guidance else {}),
            },
            policies=tuple(results),
            rewards=tuple(next(iter(results.values()))),
            cells=tuple(cells),
            scores={policy: {r: dict(m.rewards) for r, m in columns.items()} for policy, columns in results.items()},
            captions={prompt.id: prompt.text for prompt in prompts},
        )

    def line(self) -> str:
        """One line about the samples: run, updates, prompts, samples per prompt, steps and guidance."""
        s = self.settings
        updates, prompts, samples = (
            counted(count, noun)
            for count, noun in ((self.updates, "update"), (s["prompt_count"], "prompt"), (s["samples"], "sample"))
        )
        guidance = f" · guidance {s['guidance']}" if "guidance" in s else ""
        return (
            f"{self.run} after {updates} · {prompts} × {samples} × "
            f"{s['steps']} steps ({s['solver']}){guidance} · mean ± standard error over prompts, "
            "gains paired with the base"
        )

    def rows(self) -> list[list[str]]:
        """Cells as text, with one row per policy and one column per reward."""
        return [[policy, *(_text(c) for c in self.cells if c.policy == policy)] for policy in self.policies]

    def table(self) -> str:
        """`rows` as plain text."""
        return f"{self.line()}\n{plain_table([['', *self.rewards], *self.rows()])}"


def _text(cell: Cell) -> str:
    text = f"{digits(cell.mean)} ± {digits(cell.stderr)}"
    if cell.gain is None:
        return text
    error = "" if cell.gain_stderr is None else f" ± {digits(cell.gain_stderr)}"
    return f"{text} ({signed(cell.gain)}{error})"


def write_comparison(folder: Path, comparison: Comparison) -> None:
    """Write ``evaluation.json``, ``.txt`` and ``.html`` next to the images, ``<policy>/<prompt id>-<n>.png``."""
    replace_file(folder / TEXT_FILE, f"{comparison.table()}\n".encode())
    replace_file(folder / JSON_FILE, json.dumps(asdict(comparison), indent=1, ensure_ascii=False).encode())
    rows = (REFERENCE, *comparison.policies)
    pictures = {row: files for row in rows if (files := picture_paths(folder / row))}
    first = comparison.rewards[0]
    scores = {policy: columns[first] for policy, columns in comparison.scores.items()}
    write_page(
        folder / PAGE_FILE,
        "evaluation.html",
        name=comparison.run,
        line=comparison.line(),
        rewards=comparison.rewards,
        rows=comparison.rows(),
        gallery=Gallery.of(comparison.captions, pictures, scores, first),
        lossless=LOSSLESS,
    )

"""The results of ``solrl eval``: policies against rewards, as numbers, as a table and as a page with pictures."""

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
    """One policy under one reward, over held-out prompts."""

    policy: str
    reward: str
    mean: float
    stderr: float
    """Standard error over prompts of the per-prompt means."""
    gain: float | None
    """Mean over prompts of the difference to the base, at the same addresses; None without base, or for the base."""
    gain_stderr: float | None
    """Its standard error over prompts; None with a single prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    run: str
    updates: int
    settings: dict[str, Any]
    """What fixes the samples: prompts, samples, steps, solver, run seed."""
    policies: tuple[str, ...]
    rewards: tuple[str, ...]
    cells: tuple[Cell, ...]
    """Policy by policy, rewards in order."""
    scores: dict[str, dict[str, dict[str, tuple[float, ...]]]]
    """Policy → reward → prompt id → one score an address."""
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
        base = results.get(BASE)
        cells = []
        for policy, columns in results.items():
            for reward, found in columns.items():
                gain = paired_gain(base[reward], found) if base is not None and policy != BASE else None
                cells.append(
                    Cell(
                        policy=policy,
                        reward=reward,
                        mean=found.reward_mean,
                        stderr=found.reward_stderr,
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
        """What was sampled, in one line."""
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
        """A row a policy, a column a reward."""
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
    """Write ``evaluation.json``, ``.txt`` and ``.html`` beside the pictures, ``<policy>/<prompt id>-<n>.png``."""
    replace_file(folder / TEXT_FILE, f"{comparison.table()}\n".encode())
    replace_file(folder / JSON_FILE, json.dumps(asdict(comparison), indent=1, ensure_ascii=False).encode())
    rows = (REFERENCE, *comparison.policies)
    pictures = {row: found for row in rows if (found := picture_paths(folder / row))}
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

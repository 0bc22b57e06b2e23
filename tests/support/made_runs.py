"""Builds run folders with known numbers from the record classes, for the tests of what a user sees."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from solrl_ray.common.checked_json import with_checksum
from solrl_ray.config.loading import to_yaml
from solrl_ray.config.schema import Config
from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics
from solrl_ray.records import Attestation
from solrl_ray.report.grids import save_pictures
from solrl_ray.report.summary import summarize, write_summary
from solrl_ray.storage.continuation import FORMAT, FORMAT_FILE
from tests.support.made_configs import changed

CAPTIONS = {"aa": "a red circle <above> a blue square", "bb": "two green triangles", "cc": "a large yellow star"}
BASE: dict[str, tuple[float, ...]] = {"aa": (0.1, 0.3), "bb": (0.2, 0.2), "cc": (0.5, 0.7)}
FINAL: dict[str, tuple[float, ...]] = {"aa": (0.4, 0.4), "bb": (0.2, 0.4), "cc": (0.6, 0.9)}
REAL: dict[str, tuple[float, ...]] = {"aa": (0.8, 0.8), "bb": (0.9, 0.9), "cc": (1.0, 1.0)}


def config(iterations: int = 3) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "small world", "seed": 7, "iterations": iterations},
            "model": {
                "family": "flux",
                "path": "builtin:testbed/pipeline",
                "dtype": "float32",
                "resolution": 32,
                "max_sequence_length": 16,
                "schedule": {"kind": "flux"},
                "lora": {"targets": ["to_q"]},
            },
            "prompts": {"train": "builtin:train.txt", "heldout": "builtin:heldout.txt"},
            "rewards": [{"kind": "clipscore"}],
            "rollout": {"prompts": 12, "pool": 24, "keep": 8, "explore": {"precision": "nvfp4-emulated"}},
            "fleet": {"explorers": {"count": 2}, "regenerators": {"count": 1}},
        }
    )


def iteration(number: int) -> IterationMetrics:
    """Explore 4 s and regenerate 5 s overlap by 1.5 s; with learn 2 and publish 0.5: 10 s."""
    return IterationMetrics(
        iteration=number,
        revision=number,
        seconds={"explore": 4.0, "regenerate": 5.0, "learn": 2.0, "publish": 0.5, "checkpoint": 0.25, "total": 10.0},
        busy_seconds={"explore": 6.0, "regenerate": 4.5, "learn": 1.5},
        candidates=288,
        expected_candidates=288,
        samples=96,
        expected_samples=96,
        requeued_units=1 if number == 1 else 0,
        duplicate_results=0,
        reward_mean=0.3 + 0.01 * number,
        reward_std=0.1,
        proxy_reward_mean=0.25 + 0.01 * number,
        loss=0.5,
        policy_loss=0.4,
        kl=0.001 * (number + 1),
        gradient_norm=0.8,
        spearman=0.90 + 0.01 * number,
        weights_wait=0.05,
        kendall=0.80,
        side_agreement=0.95,
        selection_digest=f"selection-{number}",
        lora_digest=f"lora-{number}",
    )


def evaluation(updates: int, policy: str, rewards: dict[str, tuple[float, ...]]) -> EvaluationMetrics:
    means = [sum(values) / len(values) for values in rewards.values()]
    mean = sum(means) / len(means)
    variance = sum((value - mean) ** 2 for value in means) / max(1, len(means) - 1)
    return EvaluationMetrics(
        iteration=updates,
        policy=policy,
        reward_mean=mean,
        reward_stderr=math.sqrt(variance / len(means)),
        rewards=rewards,
        seconds=1.5,
        captions=CAPTIONS,
    )


def attestations() -> list[Attestation]:
    checks = {"known-answer vectors": "17 of 17"}
    explorer = Attestation(
        worker="explorer-0",
        device="CPU, 1 thread",
        tier="nvfp4-emulated",
        score_class="ab" * 32,
        checks=checks,
        quantized_layers=30,
        skipped_layers=12,
    )
    full = replace(explorer, worker="regenerator-0", tier="float32", checks={}, quantized_layers=0)
    return [explorer, replace(explorer, worker="explorer-1"), replace(full, skipped_layers=0)]


def evaluations(iterations: int = 3) -> list[EvaluationMetrics]:
    return [evaluation(0, "base", BASE), evaluation(0, "real", REAL), evaluation(iterations, "ema", FINAL)]


def write_metrics(folder: Path, records: list[IterationMetrics | EvaluationMetrics]) -> None:
    lines = [json.dumps(with_checksum(asdict(record))) + "\n" for record in records]
    (folder / "metrics.jsonl").write_text("".join(lines))


def write_run(
    folder: Path,
    *,
    done: int = 3,
    of: int = 3,
    evaluated: list[EvaluationMetrics] | None = None,
    finished: bool = True,
    **changes: Any,
) -> Path:
    """Writes a run folder: `done` of `of` iterations, pictures of two prompts, a summary if `finished`.

    Args:
        changes: of its configuration, by section (`made_configs.changed`).
    """
    folder.mkdir(parents=True)
    made = evaluations(done) if evaluated is None else evaluated
    chosen = changed(config(of), **changes)
    records = [iteration(number) for number in range(done)]
    (folder / FORMAT_FILE).write_text(str(FORMAT))
    (folder / "config.yaml").write_text(to_yaml(chosen))
    (folder / "attestations.json").write_text(json.dumps([asdict(record) for record in attestations()]))
    write_metrics(folder, [*made[:2], *records, *made[2:]])
    for number, record in enumerate(made):
        name = f"updates-{record.iteration:06d}-{record.policy}"
        level = torch.full((3, 8, 8), 0.2 * (number + 1))
        save_pictures(folder / "evaluations" / name, {(key, s): level for key in ("aa", "bb") for s in (0, 1)})
    if finished:
        write_summary(folder, summarize(chosen, records, made, seconds=36.5))
    return folder

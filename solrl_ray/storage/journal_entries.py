"""Entries of an iteration's journal (`solrl_ray.storage.journal`): conversion to and from records."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import Field, asdict, fields
from typing import Any

from solrl_ray.records import Scores, Selection, UnitResult, WorkUnit, flat
from solrl_ray.rollout.selection import dropped
from solrl_ray.scheduling.iteration_state import IterationPlan


def split(entries: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split the entries of an iteration that was explored ahead.

    Returns the ``explore`` entries, and the others from the last ``revision`` on.
    """
    revisions = [position for position, entry in enumerate(entries) if entry["kind"] == "revision"]
    explored = [entry for entry in entries if entry["kind"] == "explore"]
    later = [entry for entry in entries[revisions[-1] :] if entry["kind"] != "explore"] if revisions else []
    return explored, later


def plan_entry(plan: IterationPlan) -> dict[str, Any]:
    """All fields of a plan, as JSON."""
    entry: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    weights = entry["selection"].pop("reward_weights")
    if weights:  # the key that earlier versions wrote
        entry["selection"]["weights"] = weights
    return entry


def same_work(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if two headers are equal except for the bytes of the sampling policy and the score classes of workers."""
    any_workers = {"policy_digest": "", "score_class": ""}
    plans = [{**header, "plan": header.get("plan", {}) | any_workers} for header in (one, other)]
    return plans[0] == plans[1]


def maker(stale: dict[str, Any], header: dict[str, Any]) -> str:
    """Describe the origin of a stale journal: how its header differs from the current one."""
    if stale["plan"].get("policy_digest") != header["plan"]["policy_digest"]:
        return "another revision's bytes"
    return "workers of other score classes (another device, thread count or library), or with other prompts"


def unit_entry(result: UnitResult) -> dict[str, Any]:
    """The entry of an accepted result. Scores are stored as hexadecimal float32, so that their bits are exact."""
    return {
        "kind": result.unit.stage,
        "prompt": result.unit.prompt_id,
        "indices": list(result.unit.indices),
        **{name: _hex([*flat(column)]) for name, column in result.columns.items() if column},
        **({"dropped": list(dropped(result))} if result.early else {}),
        "worker": result.worker,
        "score_class": result.score_class,
        "seconds": result.seconds,
        **({"samples": result.samples_digest} if result.samples_digest else {}),
    }


def unit_result(entry: dict[str, Any], plan: IterationPlan) -> UnitResult:
    """The result in an entry of `unit_entry`."""
    columns: dict[str, Any] = {column.name: _column(entry, column) for column in fields(Scores) if column.name in entry}
    return UnitResult(
        **columns,
        unit=WorkUnit(
            stage=entry["kind"],
            iteration=plan.iteration,
            revision=plan.exploring_revision,
            prompt_id=entry["prompt"],
            indices=tuple(entry["indices"]),
            prune=plan.prune,
        ),
        worker=entry["worker"],
        score_class=entry["score_class"],
        seconds=entry["seconds"],
        samples_digest=entry.get("samples", ""),
    )


def _hex(values: Sequence[float]) -> str:
    return struct.pack(f"<{len(values)}f", *values).hex()


def _column(entry: dict[str, Any], column: Field[Any]) -> tuple[Any, ...]:
    """Read a column of `Scores` from an entry."""
    raw = bytes.fromhex(entry[column.name])
    numbers = struct.unpack(f"<{len(raw) // 4}f", raw)
    size = len(numbers) // len(entry["indices"])
    nested = column.metadata.get("nested", False)
    return tuple(numbers[i : i + size] for i in range(0, len(numbers), size)) if nested else numbers


def selection_entry(selection: Selection) -> dict[str, Any]:
    """The entry of a selection: the indices of its best and worst seeds."""
    return {
        "kind": "selection",
        "prompt": selection.prompt_id,
        "top": [c.index for c in selection.top],
        "bottom": [c.index for c in selection.bottom],
    }

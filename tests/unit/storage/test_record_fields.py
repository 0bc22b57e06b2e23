"""Every field of an answer and of a sample group arrives: by wire, in the journal and in the run folder."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields, is_dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from solrl_ray import records
from solrl_ray.records import Pruning, SampleGroup, SampleShape, Scores, Trajectory, UnitResult
from solrl_ray.scheduling.iteration_state import IterationPlan, group_digest
from solrl_ray.storage.journal_entries import unit_entry, unit_result
from solrl_ray.storage.run_folder import RunFolder

T = TypeVar("T")
PLAN = IterationPlan(iteration=3, revision=3, prompt_ids=("beef",), pool=4, keep=2, unit=4, prune=Pruning(1, 2))
SAMPLES = 4


def filled(kind: type[T]) -> T:
    """A record each of whose fields has a value of its own, by its type and not its name."""
    numbers = count(1)
    made = {
        "str": lambda: f"text {next(numbers)}",
        "int": lambda: next(numbers),
        "float": lambda: next(numbers) + 0.25,
        "tuple[int, ...]": lambda: tuple(next(numbers) for _ in range(SAMPLES)),
        "tuple[float, ...]": lambda: tuple(next(numbers) + 0.5 for _ in range(SAMPLES)),
        "tuple[tuple[float, ...], ...]": lambda: tuple((next(numbers) + 0.5, -0.5) for _ in range(SAMPLES)),
        "WorkUnit": lambda: PLAN.pool_units()[0],
        "Mapping[str, int] | None": lambda: {"requests": next(numbers)},
        "SampleShape | None": lambda: SampleShape(next(numbers), next(numbers), next(numbers)),
        "Trajectory | None": lambda: Trajectory(states=torch.rand(SAMPLES, 2, 3), first_step=next(numbers)),
        "torch.Tensor": lambda: torch.rand(SAMPLES, 3),
    }
    record: Any = kind
    return kind(**{each.name: made[each.type]() for each in fields(record)})


def same(found: Any, given: Any) -> bool:
    if isinstance(given, torch.Tensor):
        return torch.equal(found, given)
    if is_dataclass(given) and not isinstance(given, type):
        return type(found) is type(given) and all(
            same(getattr(found, each.name), getattr(given, each.name)) for each in fields(given)
        )
    return bool(found == given) and type(found) is type(given)


def lost(found: Any, given: Any) -> list[str]:
    return [each.name for each in fields(given) if not same(getattr(found, each.name), getattr(given, each.name))]


@pytest.mark.parametrize("kind", [UnitResult, SampleGroup])
def test_every_field_arrives_at_another_process(kind: type[Any]) -> None:
    given = filled(kind)
    assert lost(pickle.loads(pickle.dumps(given, protocol=5)), given) == []


def test_the_journal_has_every_field_of_an_answer_that_more_than_a_live_run_reads() -> None:
    given = filled(UnitResult)
    found = unit_result(json.loads(json.dumps(unit_entry(given))), PLAN)
    momentary = {each.name for each in fields(UnitResult) if not each.metadata.get("kept", True)}
    assert set(lost(found, given)) == momentary
    assert "worker" not in momentary


def test_the_run_folder_has_every_field_of_a_group(tmp_path: Path) -> None:
    given = filled(SampleGroup)
    folder = RunFolder(tmp_path)
    folder.save_group(given)
    assert lost(folder.load_group(given.iteration, given.prompt_id), given) == []


@pytest.mark.parametrize("column", [each.name for each in fields(Scores)])
def test_every_number_of_a_sample_counts_in_digests_and_goes_with_its_sample(column: str) -> None:
    group = filled(SampleGroup)
    values = getattr(group, column)
    other = replace(group, **{column: values[::-1]})
    assert group_digest(other) != group_digest(group)
    assert other.numbers != group.numbers
    rows = records.scores_of([(group, 2), (other, 2), (group, 0)])
    assert getattr(rows, column) == (values[2], values[1], values[0])

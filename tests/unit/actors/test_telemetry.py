"""What is known of a run while it goes on, and after a resume."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from actors.monitoring.telemetry import Telemetry
from solrl_ray.errors import RunError, UserError
from solrl_ray.records import Attestation
from solrl_ray.storage.run_folder import RunFolder
from tests.support import made_runs


def telemetry(path: Path) -> Telemetry:
    made = Telemetry(made_runs.config(), RunFolder(path))
    made.resume([], [])
    return made


def stored(path: Path) -> list[Attestation]:
    return [Attestation(**values) for values in json.loads((path / "attestations.json").read_text())]


def test_attestations_of_earlier_workers_survive_a_resume(tmp_path: Path) -> None:
    explorer_0, explorer_1, regenerator = made_runs.attestations()
    first = telemetry(tmp_path)
    first.attested(explorer_1)
    first.attested(regenerator)
    first.close()
    elsewhere = replace(explorer_1, device="NVIDIA H200", score_class="cd" * 32)
    second = telemetry(tmp_path)
    for attestation in (explorer_0, elsewhere, regenerator):  # the same names, one of them on another device
        second.attested(attestation)
    second.close()
    assert sorted(map(str, map(asdict, stored(tmp_path)))) == sorted(
        map(str, map(asdict, [explorer_0, explorer_1, elsewhere, regenerator]))
    )


def test_damaged_attestations_are_named(tmp_path: Path) -> None:
    (tmp_path / "attestations.json").write_text("[{")
    with pytest.raises(UserError, match=r"attestations\.json is not JSON: "):
        telemetry(tmp_path)


def test_a_new_run_has_no_attestations_but_its_own(tmp_path: Path) -> None:
    explorer = made_runs.attestations()[0]
    made = telemetry(tmp_path)
    made.attested(explorer)
    made.attested(explorer)
    made.close()
    assert stored(tmp_path) == [explorer]


def test_a_resumed_run_goes_on_to_count_where_it_was(tmp_path: Path) -> None:
    made = Telemetry(made_runs.config(), RunFolder(tmp_path))
    assert made.progress().elapsed < 20
    made.resume([made_runs.iteration(0), made_runs.iteration(1)], made_runs.evaluations()[:2])
    assert 23 < made.progress().elapsed < 40  # 2 iterations of 10 s, 2 evaluations of 1.5 s, and what passed here
    made.close()


def test_a_disk_that_takes_no_timeline_is_told_to_who_asks_for_progress(tmp_path: Path) -> None:
    config = made_runs.config()
    deadlines = config.fleet.deadlines.model_copy(update={"checkpoint": 0.2})
    config = config.model_copy(update={"fleet": config.fleet.model_copy(update={"deadlines": deadlines})})
    made = Telemetry(config, RunFolder(tmp_path))
    os.mkfifo(tmp_path / "spans.jsonl")  # who opens it waits for a reader
    writing = threading.Thread(target=lambda: made.resume([made_runs.iteration(0)], []))
    writing.start()
    said = r"^opening spans\.jsonl in .* \(fleet\.deadlines\.checkpoint\) passed its deadline of 0\.2 s$"

    def ask() -> None:
        while writing.is_alive():
            made.progress()
            writing.join(0.05)

    with pytest.raises(RunError, match=said):
        ask()
    reader = os.open(tmp_path / "spans.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    writing.join(20.0)
    assert not writing.is_alive()
    assert made.progress().iteration == 1
    made.close()
    os.close(reader)

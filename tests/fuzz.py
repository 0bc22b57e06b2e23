"""Bytes that are not as they were: every format that is read, altered at random.

    python -m tests.fuzz --mutations 1000000 --seed 1        # make fuzz

What reads a format either refuses it with one of this project's sentences, or gives what was written: where there is
a digest nothing else, where there is none something of its form. Any other exception ends the search, with its seed,
its number and its bytes.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from solrl_ray.common.files import read_json, replace_file
from solrl_ray.config.loading import load
from solrl_ray.errors import RunError, UserError
from solrl_ray.learning.state import LearnerState
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.records import SampleGroup
from solrl_ray.report.data import read_attestations, read_summary
from solrl_ray.report.summary import summarize, write_summary
from solrl_ray.storage.journal import Journal
from solrl_ray.storage.run_folder import RunFolder, Unreadable
from tests.support import made_configs, made_runs

REFUSALS = (UserError, RunError, Unreadable)
WORDS = (b"[", b"{", b'"', b"-1", b"4.5", b"null", b"1e999", b"\n", b"\\u")
LONGEST = 40
"""Bytes that one mutation takes out or puts in."""


@dataclass(frozen=True, slots=True)
class Format:
    """A file, and who reads it."""

    file: Path
    read: Callable[[], Any]
    accepts: Callable[[Any, Any], bool]
    """Whether what was read may come of what was written."""
    weight: int = 10
    """How often it is altered, beside the others."""


def same(found: Any, written: Any) -> bool:
    return bool(found == written)


def beginning(found: Any, written: Any) -> bool:
    return bool(found == written[: len(found)])


def anything(found: Any, written: Any) -> bool:
    """Of a format without a digest."""
    return True


def formats(folder: Path) -> dict[str, Format]:
    """Every format, in files below `folder`."""
    run = RunFolder(made_runs.write_run(folder / "run"))
    config = made_runs.config()
    write_summary(run.path, summarize(config, [made_runs.iteration(0)], made_runs.evaluations(), seconds=1.0))
    journal = Journal(run.path / "journal" / "iteration-000000.jsonl")
    journal.append(*({"kind": "explore", "prompt": f"{n:016x}", "rewards": "00" * n} for n in range(6)))
    journal.close()
    group = SampleGroup(
        iteration=0, revision=0, prompt_id="aa", indices=(0, 1), rewards=(0.5, 1.0), latents=torch.ones(2, 3)
    )
    run.save_group(group)
    factors = {"to_q.lora_A": torch.ones(2, 4), "to_q.lora_B": torch.arange(6.0).reshape(3, 2)}
    policies = {name: {key: value.clone() for key, value in factors.items()} for name in ("default", "old", "ema")}
    state = LearnerState(updates=0, steps=0, **policies, exp_avg={}, exp_avg_sq={})
    state.save(folder / "state")
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"text": "a red square"}\n{"text": "zwei Kreise \\u00e4"}\n')
    settings = folder / "config.yaml"
    settings.write_text(made_configs.MODEL + made_configs.REST)
    stored = run.path / "samples" / "iteration-000000" / "aa.safetensors"
    return {
        "metrics": Format(run.metrics, run.read_metrics, beginning),
        "summary": Format(run.path / "summary.json", lambda: read_summary(run.path), same),
        "journal": Format(journal.path, lambda: Journal(journal.path).entries(), beginning, 30),
        "state": Format(folder / "state" / "state.json", lambda: _parts(LearnerState.load(folder / "state")), same),
        "factors": Format(folder / "state" / _first(folder), lambda: _parts(LearnerState.load(folder / "state")), same),
        "group": Format(stored, lambda: run.load_group(0, "aa"), anything),
        "attestations": Format(
            run.path / "attestations.json", lambda: read_attestations(run.path / "attestations.json"), anything
        ),
        "json": Format(run.path / "trackers.json", lambda: read_json(run.path / "trackers.json"), anything),
        "prompts": Format(prompts, lambda: read_prompts(str(prompts)), anything),
        "configuration": Format(settings, lambda: load([settings]), anything, 1),
    }


def _parts(state: LearnerState) -> dict[str, Any]:
    return {"updates": state.updates, "default": {name: tensor.tolist() for name, tensor in state.default.items()}}


def _first(folder: Path) -> str:
    return min(path.name for path in (folder / "state").glob("*.safetensors"))


def mutated(content: bytes, chance: random.Random) -> bytes:
    """`content` with one thing altered, or a few."""
    altered = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        at = chance.randrange(len(altered) + 1)
        length = chance.randrange(1, LONGEST)
        match chance.randrange(7):
            case 0 if at < len(altered):
                altered[at] ^= 1 << chance.randrange(8)
            case 1 if at < len(altered):
                altered[at] = chance.randrange(256)
            case 2:
                del altered[at : at + length]
            case 3:
                altered[at:at] = chance.randbytes(length)
            case 4:
                altered[at:at] = altered[at : at + length]
            case 5:
                del altered[at:]
            case _:
                altered[at : at + 1] = chance.choice(WORDS)
    return bytes(altered)


def search(mutations: int, seed: int) -> Counter[str]:
    """Alter and read; how often each format was refused, and how often read.

    Raises AssertionError or whatever a reader raised, with a note that says how to make it again.
    """
    found = Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        known = formats(Path(place))
        for each in known.values():
            if not each.file.exists():
                replace_file(each.file, b'{"explorers": 3}')
        written = {name: each.read() for name, each in known.items()}
        original = {name: each.file.read_bytes() for name, each in known.items()}
        names, weights = list(known), [each.weight for each in known.values()]
        for number in range(mutations):
            chance = random.Random(f"{seed}/{number}")
            name = chance.choices(names, weights)[0]
            each = known[name]
            each.file.write_bytes(mutated(original[name], chance))
            try:
                value = each.read()
                assert each.accepts(value, written[name]), f"{name}: a wrong value was accepted: {value}"
                found[f"{name} read"] += 1
            except REFUSALS:
                found[f"{name} refused"] += 1
            except Exception as error:
                error.add_note(f"seed {seed}, mutation {number}: {name}, {each.file.read_bytes()!r}")
                raise
            finally:
                each.file.write_bytes(original[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began = time.monotonic()
    found = search(arguments.mutations, arguments.seed)
    for name, count in sorted(found.items()):
        print(f"{count:>9,} {name}")
    print(f"{arguments.mutations:,} mutations in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()

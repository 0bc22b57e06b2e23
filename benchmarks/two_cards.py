"""What a run on two cards does when one dies in an update, and what an explorer beside a card waits for weights.

    python benchmarks/two_cards.py flux [--only PART] [--seconds 560] [--work FOLDER] [--out FOLDER] [--set a.b=c]
    python benchmarks/two_cards.py testbed --gpus 0 --work /tmp/two_cards --out /tmp    # on a CPU: proves the script

The run is that of `many_gpus.py` with 2 prompts, 8 of 48 seeds and pruned previews. Parts, each a run:

    alone         one card, which explores, regenerates and learns
    beside        such a card; on the other one an explorer with a process of its own, which gets packed weights
    split_packed  one card samples and gets packed weights, the other one learns
    split_lora    the same, and it gets factors (`publish.mode: lora`)
    lost_0        both explore, regenerate and learn; the process of card 0 is killed in the second update
    lost_1        the same with card 1; the ranks meet at an address of card 0

A card is killed (SIGKILL) after 0.3 of the seconds that the update before took. Prints a part's figures; writes
two_cards_MODEL.json after each. What other parts measured before stays. Of each part:

    first_exploring, first_update  seconds from the command to the first preview (without evaluations before it), and
                                   to the end of the first update, with them: what it takes to start all again
    publish                        for each revision after the first and each explorer: seconds from the end of the
                                   update to its first preview with that revision
    load                           for each of these revisions: the longest that an explorer took to load it, seconds
    lost                           `to_next_update`: seconds from the kill to the end of the update that it was in;
                                   `lived`: other cards whose process was there at that time; `said`; and `work`: what
                                   workers said they did meanwhile, from so many seconds after the kill on
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import many_gpus
import torch
from common import MODELS, gpus, make, options, parsed, write
from phases import first_exploring

from solrl_ray.report.trace import Span, read_spans

COUNTS = {"alone": (1, 1, 1), "beside": (2, 1, 1), "split": (1, 1, 1), "lost": (2, 2, 2)}
"""Explorers, regenerators and learner ranks, by a part's first word."""
PARTS = ("alone", "beside", "lost_1", "lost_0", "split_packed", "split_lora")
SMALL = (
    "rollout={pool: 48, keep: 8}",
    "rollout.preview={prune: {after: 2, keep: 24}}",
    "rollout.regenerate.micro_batch=8",
    "learner.micro_batch=4",
)
"""As in `rehearsal.py`; the testbed has its own."""
ITERATIONS = 3
SHARE = 0.3
"""Of an update, after which a card is killed in the next one."""
UPDATING = b"ray::learner.update"
"""Title of a process that learns."""
ACTOR = re.compile(r"^:actor_name:(\S+)$", re.MULTILINE)
"""In the file to which a process of Ray prints: what it is called. The last one counts."""
SAID = re.compile(r"lost|rebuilt|go to others|is done again|learners (compile|have compiled)")
SHORTEST = 0.3
"""Seconds of work that is told."""


# The loss of a card


class CardKiller(threading.Thread):
    """Kills the process of a card in the update of iteration 1, and watches those of the others."""

    def __init__(self, folder: Path, card: int) -> None:
        super().__init__(daemon=True)
        self._folder, self.card = folder, f"card-{card}"
        self._over = threading.Event()
        self.at = 0.0
        """When it was killed, since 1970; 0 if it was not."""
        self.ended: dict[str, float] = {}
        """By name of the other cards: when their processes were first seen to be gone."""

    def run(self) -> None:
        while not (updates := seconds_of_updates(self._folder)) or self.card not in updating():
            if self._over.wait(0.02):
                return
        self._over.wait(SHARE * updates[0])
        others = updating()
        if self.card not in others:
            return
        os.kill(others.pop(self.card), signal.SIGKILL)
        self.at = time.time()
        while not self._over.wait(0.1):
            for card in [card for card, pid in others.items() if not alive(pid)]:
                others.pop(card)
                self.ended[card] = time.time()
        self.ended |= dict.fromkeys(others, float("inf"))

    def stop(self) -> None:
        self._over.set()
        self.join()


def seconds_of_updates(folder: Path) -> list[float]:
    """Of the iterations that the run has finished."""
    return [record["busy_seconds"]["learn"] for record in iterations(folder)]


def iterations(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [record for record in records if record["event"] == "iteration"]


def updating() -> dict[str, int]:
    """Name → process of the cards that learn now, among those that this process started."""
    found = {}
    for pid in descendants(os.getpid()):
        with suppress(OSError):  # it ends meanwhile
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(UPDATING):
                printed = Path(f"/proc/{pid}/fd/1").read_text(errors="replace")
                found[ACTOR.findall(printed)[-1]] = pid
    return found


def descendants(pid: int) -> list[int]:
    """Its children, their children and so on."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            children.setdefault(int(fields(stat)[1]), []).append(int(stat.parent.name))
    found, left = [], [pid]
    while left:
        found += children.get(left[0], [])
        left += children.get(left.pop(0), [])
    return found


def alive(pid: int) -> bool:
    """False for one that is gone, or ended and not yet waited for."""
    with suppress(OSError):
        return fields(Path(f"/proc/{pid}/stat"))[0] not in "ZX"
    return False


def fields(stat: Path) -> list[str]:
    """Of a process, from its state on: the title before it may have spaces."""
    return stat.read_text().rpartition(")")[2].split()


# Figures


def figures(folder: Path, began: float) -> dict[str, Any]:
    """Of every part; `began`: when the command was started, since 1970."""
    spans, records = read_spans(folder), iterations(folder)
    return {
        "first_exploring": first_exploring(spans, began),
        "first_update": round(min(span.ended for span in spans if span.stage == "learn") - began, 3),
        "publish": [waits(spans, record["iteration"]) for record in records[1:]],
        "load": [round(record["publication"]["load_seconds"], 3) for record in records[1:]],
        "packed": [bool(record["publication"]["packed"]) for record in records[1:]],
        "iterations": [{stage: round(taken, 2) for stage, taken in record["seconds"].items()} for record in records],
    }


def waits(spans: Sequence[Span], revision: int) -> dict[str, float]:
    """Seconds from the end of the update that a revision is of to each explorer's first preview with it."""
    name = f"publishing revision {revision}"
    (published,) = (span.started for span in spans if span.kind == "stage" and span.name == name)
    first: dict[str, float] = {}
    for span in spans:  # by their starts
        if span.kind == "unit" and span.stage == "explore" and span.iteration == revision:
            first.setdefault(span.worker, round(span.started - published, 3))
    return first


def loss(spans: Sequence[Span], killer: CardKiller, printed: str) -> dict[str, Any]:
    """What the death of a card cost. Exits if it was not killed in the update."""
    (update,) = (span for span in spans if span.kind == "stage" and span.stage == "learn" and span.iteration == 1)
    if not update.started < killer.at < update.ended:
        raise SystemExit(f"{killer.card} was not killed in the update of iteration 1")
    work = [span for span in spans if span.kind == "work" and killer.at < span.ended and span.started < update.ended]
    return {
        "card": killer.card,
        "into_update": round(killer.at - update.started, 3),
        "to_next_update": round(update.ended - killer.at, 3),
        "lived": sorted(card for card, ended in killer.ended.items() if ended > update.ended),
        "said": [line for line in printed.splitlines() if SAID.search(line)],
        "work": [
            (span.worker, span.name, round(span.started - killer.at, 2), round(span.seconds, 2))
            for span in work
            if span.seconds >= SHORTEST
        ],
    }


# The parts


def run(arguments: argparse.Namespace, part: str) -> argparse.Namespace:
    """The arguments of `many_gpus.py` for a part."""
    kind, _, detail = part.partition("_")
    explorers, regenerators, ranks = COUNTS[kind]
    given = [
        f"fleet.explorers.count={explorers}",
        f"fleet.regenerators.count={regenerators}",
        f"learner.world_size={ranks}",
        *(SMALL if arguments.model != "testbed" else ()),
        *([f"publish.mode={detail}"] if kind == "split" else ()),
        *arguments.set,
    ]
    placement = "split" if kind == "split" else "colocated"
    fixed = {"prompts": 2, "iterations": ITERATIONS, "staleness": 0, "placement": placement, "part": None, "set": given}
    return argparse.Namespace(**vars(arguments) | fixed | {"gpus": min(arguments.gpus, 1 if part == "alone" else 2)})


def measured(arguments: argparse.Namespace, part: str) -> dict[str, Any]:
    given = run(arguments, part)
    folder, log = many_gpus.run_folder(given), arguments.work / f"{part}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    killer = CardKiller(folder, int(part[-1])) if part.startswith("lost") else None
    began = time.time()
    if killer:
        killer.start()
    try:
        found = many_gpus.train(given, log)
    finally:
        if killer:
            killer.stop()
        print(log.read_text(), flush=True)
    kept = ("wall", "busy", "peak_gb", "requeued_units", "digests")
    found = {key: found[key] for key in kept} | figures(folder, began) | {"set": given.set}
    return found | ({"lost": loss(read_spans(folder), killer, log.read_text())} if killer else {})


def add(arguments: argparse.Namespace, part: str, found: dict[str, Any]) -> None:
    """Put a part's result into the file."""
    file: Path = arguments.out / f"two_cards_{arguments.model}.json"
    parts = json.loads(file.read_text())["parts"] if file.exists() else {}
    conditions = {"device": torch.cuda.get_device_name() if gpus() else "CPU", "torch": torch.__version__}
    write(file, {"model": arguments.model, "parts": parts | {part: found | conditions}})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*MODELS, "testbed"])
    parser.add_argument("--only", choices=PARTS, help="one part; default: each, one after another")
    parser.add_argument("--gpus", type=int, choices=(0, 2), default=2, help="0: on a CPU")
    parser.add_argument("--seconds", type=float, default=560.0, help="of a part's run, its start included")
    options(parser)
    arguments = parsed(parser, argv)
    if arguments.model != "testbed":
        make(arguments.model, arguments.work, arguments.layers)
    for part in [arguments.only] if arguments.only else PARTS:
        found = measured(arguments, part)
        add(arguments, part, found)
        print(json.dumps({part: found}, indent=1), flush=True)


if __name__ == "__main__":
    main()

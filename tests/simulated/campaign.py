"""Simulates runs from a range of seeds: ``python -m tests.simulated.campaign 0..100000``.

Prints seeds a second, each seed with a violation, and how many faults have happened; with ``--trace``, the trace of one
seed. With ``--record FILE`` it is written as it goes on, after what the file has of the seeds before:
``benchmarks/results/simulation.json``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from multiprocessing import Pool
from pathlib import Path

from tests.simulated.plans import Plan
from tests.simulated.runs import judge, run, violation


def simulated(seed: int) -> tuple[int, str, list[str], int]:
    """A seed, what did not hold in its run, the kinds of its faults, and how many of them did not happen."""
    plan = Plan.of(seed)
    kinds = [f"{fault.role} {fault.kind}" for fault in (*plan.faults, *plan.ends)]
    kinds += ["a pool is scaled"] * len(plan.scales)
    said, missed = judge(plan)
    return seed, said, kinds, len(missed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", help="a..b, without b; or one seed with --trace")
    parser.add_argument("--trace", action="store_true", help="print what happens in the run of one seed")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write counts of seeds, faults and violations")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.trace:
        plan = Plan.of(int(arguments.seeds))
        ended = run(plan)
        print(*ended.trace, f"{plan}", f"errors: {ended.errors}", f"violation: {violation(plan)}", sep="\n")
        return 0
    first, last = map(int, arguments.seeds.split(".."))
    began, kinds, violations, lacking = time.monotonic(), Counter[str](), 0, 0
    before = {"first": first, "last": first, "seconds": 0, "violations": 0, "faults": {}}
    if arguments.record and arguments.record.is_file():
        before = json.loads(arguments.record.read_text())
        assert before["last"] == first, f"{arguments.record} ends before seed {before['last']}"

    def record(done: int) -> None:
        if arguments.record:
            counts = {
                "first": before["first"],
                "last": first + done,
                "seeds": first + done - before["first"],
                "violations": before["violations"] + violations,
                "seconds": before["seconds"] + round(time.monotonic() - began),
                "faults": dict(Counter(before["faults"]) + kinds),
            }
            arguments.record.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n")

    with Pool(arguments.processes) as pool:
        for done, (seed, said, drawn, missed) in enumerate(
            pool.imap(simulated, range(first, last), chunksize=20), start=1
        ):
            kinds.update(drawn)
            lacking += missed
            if said:
                violations += 1
                print(f"seed {seed}: {said}", flush=True)
            if done % 1000 == 0:
                print(f"{done} seeds, {done / (time.monotonic() - began):.1f} a second", flush=True)
                record(done)
    seconds = time.monotonic() - began
    print(f"{last - first} seeds in {seconds:.0f} s, {violations} violations")
    print(f"{kinds.total() - lacking} of {kinds.total()} faults and resizes have happened")
    record(last - first)
    return int(violations > 0)


if __name__ == "__main__":
    raise SystemExit(main())

"""Simulates runs from a range of seeds: ``python -m tests.simulated.campaign 0..100000``.

Prints seeds a second and each seed with a violation; with ``--trace``, the trace of one seed. A whole campaign is
recorded in ``benchmarks/results/simulation.json``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from multiprocessing import Pool
from pathlib import Path

from tests.simulated.runs import Plan, run, violation

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "simulation.json"


def simulated(seed: int) -> tuple[int, str, list[str]]:
    """A seed, what did not hold in its run, and the kinds of its faults."""
    plan = Plan.of(seed)
    kinds = [f"{fault.role} {fault.kind}" for fault in (*plan.faults, *plan.ends)]
    kinds += ["a pool is scaled"] * len(plan.scales) + ["an evaluation from outside"] * len(plan.evaluations)
    return seed, violation(plan), kinds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", help="a..b, without b; or one seed with --trace")
    parser.add_argument("--trace", action="store_true", help="print what happens in the run of one seed")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.trace:
        plan = Plan.of(int(arguments.seeds))
        ended = run(plan)
        print(*ended.trace, f"{plan}", f"errors: {ended.errors}", f"violation: {violation(plan)}", sep="\n")
        return 0
    first, last = map(int, arguments.seeds.split(".."))
    began, kinds, violations = time.monotonic(), Counter[str](), 0
    with Pool(arguments.processes) as pool:
        for done, (seed, said, drawn) in enumerate(pool.imap(simulated, range(first, last), chunksize=20), start=1):
            kinds.update(drawn)
            if said:
                violations += 1
                print(f"seed {seed}: {said}", flush=True)
            if done % 1000 == 0:
                print(f"{done} seeds, {done / (time.monotonic() - began):.1f} a second", flush=True)
    seconds = time.monotonic() - began
    print(f"{last - first} seeds in {seconds:.0f} s, {violations} violations")
    if arguments.record:
        record = {"seeds": last - first, "violations": violations, "seconds": round(seconds), "faults": dict(kinds)}
        RESULTS.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return int(violations > 0)


if __name__ == "__main__":
    raise SystemExit(main())

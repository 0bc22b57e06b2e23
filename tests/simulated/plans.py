"""What a seed decides: the size of a run, and what goes wrong in it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.simulated.faults import Fault

SHAPES = 80
"""Kinds of runs among all seeds."""
CALL = ("dies before", "dies after", "hangs", "hangs after", "is slow", "is late")
ANSWER = (*CALL, "comes twice", "loses its input")
WORKER = (*ANSWER, "lost its samples", "cannot start", "is never placed")
KINDS = {
    "explorer": (*WORKER, "answers NaN", "answers another unit", "answers another revision"),
    "regenerator": WORKER,
    "selector": (*ANSWER, "dies before, and a line is damaged"),
    "learner": CALL,
    "text_encoder": ("dies before", "hangs", "is slow", "is late", "comes twice"),
    "node": ("dies", "drains"),
}

ENDS = (
    ("controller", "dies"),
    ("controller", "dies beside the disk"),
    ("controller", "hangs at the disk"),
    ("disk", "loses power"),
    ("disk", "loses power and a block"),
    ("disk", "is full"),
)
"""What ends an attempt, after which the run is resumed: of what, and how."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a run, on which its result depends, and those on which it does not."""

    iterations: int
    prompts: int
    units: int
    staleness: int
    every: int
    strategy: str
    unit: int = 4
    """Candidates of a unit of previews, which are sampled four at a time."""
    on_collapse: str = "warn"
    prune: str = "null"
    """How units of previews are pruned, after 1 of 3 steps."""
    together: bool = False
    """Whether held-out prompts are evaluated two at a time."""

    @property
    def settings(self) -> tuple[str, ...]:
        one_stage = self.strategy != "two_stage"
        pool, keep = 4 * self.units, 4
        return (
            f"run.iterations={self.iterations}",
            f"run.on_collapse={self.on_collapse}",
            f"rollout={{prompts: {self.prompts}, pool: {pool}, keep: {keep}, strategy: {self.strategy}, "
            f"max_staleness: {0 if one_stage else self.staleness}}}",
            "rollout.explore={steps: 3, micro_batch: 4}",
            *([] if one_stage else [f"rollout.preview={{unit: {self.unit}, prune: {self.prune}}}"]),
            "rollout.regenerate={steps: 4, micro_batch: 4}",
            f"evaluation={{every: {self.every}, prompts: 2, samples: 2, micro_batch: {4 * self.together}, pictures: 0, "
            "reference: ''}",
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a seed decides."""

    seed: int
    shape: Shape
    explorers: int
    regenerators: int
    ranks: int
    nodes: int = 1
    faults: tuple[Fault, ...] = ()
    """Of actors and nodes, in the first attempt."""
    ends: tuple[Fault, ...] = ()
    """One for each attempt that does not come to the run's end by itself; the next one resumes."""
    scales: tuple[tuple[int, str, int], ...] = ()
    """With the controller's how manieth call which pool is given which size."""
    compiled: bool = False
    """Whether learners compile."""
    colocated: bool = False
    """Whether a process a card has all of its roles."""

    @classmethod
    def of(cls, seed: int) -> Plan:
        rng = random.Random(f"shape {seed % SHAPES}")  # whose undisturbed run is needed as well
        one_stage = rng.random() < 0.25
        shape = Shape(
            iterations=rng.choice([2, 2, 3]),
            prompts=rng.choice([1, 2, 3]),
            units=rng.choice([2, 3]),
            staleness=rng.choice([0, 0, 1]),
            every=rng.choice([0, 0, 1]),
            strategy="scaled" if one_stage else "two_stage",
        )
        if not one_stage:
            shape = _pruned(shape, rng)
        if shape.every:  # longer, so that there is something to go back to
            shape = replace(shape, iterations=shape.iterations + 1, on_collapse="rollback")
            if seed % 2 and shape.iterations == 4:  # and in some after every second iteration
                shape = replace(shape, every=2)
        shape = replace(shape, together=rng.random() < 0.3)
        rng = random.Random(seed)
        plan = cls(
            seed,
            shape,
            explorers=rng.choice([1, 2, 3]),
            regenerators=rng.choice([1, 2]),
            ranks=rng.choice([1, 2]),
            compiled=rng.random() < 0.3,
            colocated=not shape.staleness and rng.random() < 0.6,
        )
        roles = [rng.choice(list(KINDS)) for _ in range(rng.choice([0, 1, 1, 2, 2, 3]))]
        ends = [rng.choice(ENDS) for _ in range(rng.choice([0, 0, 0, 0, 1, 2]))]
        sent = plan.calls("controller", "dies")
        pools = ["explorers", "regenerators"]
        scales = [
            (rng.randint(1, sent), rng.choice(pools), rng.choice([1, 2, 3])) for _ in range(rng.choice([0, 0, 1, 2]))
        ]
        return replace(
            plan,
            nodes=rng.choice([2, 3] if "node" in roles else [1, 2, 3]),
            faults=tuple(plan.drawn(role, rng.choice(plan.kinds(role)), rng) for role in roles),
            # What comes after the first one is shorter.
            ends=tuple(plan.drawn(role, kind, rng, share=1 / (1 + number)) for number, (role, kind) in enumerate(ends)),
            scales=tuple(scales),
        )

    def drawn(self, role: str, kind: str, rng: random.Random, share: float = 1.0) -> Fault:
        """A fault of this kind where the run comes by."""
        return Fault(role, rng.randint(1, max(1, round(share * self.calls(role, kind)))), kind)

    def kinds(self, role: str) -> tuple[str, ...]:
        """Kinds of faults that can happen to a role."""
        makes_samples = role != "explorer" or self.shape.strategy != "two_stage"
        return tuple(kind for kind in KINDS[role] if kind != "lost its samples" or makes_samples)

    def calls(self, role: str, kind: str) -> int:
        """About the last call that such a fault can affect, if nothing else happens; measured, and rather too few."""
        shape, sizes = self.shape, {"explorer": self.explorers, "regenerator": self.regenerators}
        iterations, prompts = shape.iterations, shape.prompts
        if kind == "is never placed":
            return sizes[role]
        if kind == "cannot start":
            return 2 * sizes[role]
        one_stage = shape.strategy != "two_stage"
        counts = {
            "explorer": iterations * prompts * 4 * shape.units // shape.unit + self.explorers * (3 + 3 * iterations),
            "regenerator": (not one_stage) * iterations * prompts + self.regenerators * (5 + 3 * iterations) + 4,
            "learner": self.ranks * (6 + 5 * iterations),
            "selector": iterations * (4 + prompts),
            "text_encoder": 2 + iterations * prompts,
            "disk": 20 + 100 * iterations,
        }
        actors = ("explorer", "regenerator", "learner", "selector", "text_encoder")
        counts["controller"] = counts["node"] = sum(counts[each] for each in actors)
        return 10 + 40 * iterations if kind.endswith("the disk") else counts[role]


def _pruned(shape: Shape, rng: random.Random) -> Shape:
    """The same with another unit, which may be pruned."""
    pool, whole = 4 * shape.units, rng.random() < 0.6
    unit = pool if whole else 4
    if rng.random() < 0.5:
        return replace(shape, unit=unit)
    keep = rng.choice(range(4, pool, 2)) if whole else pool // 2
    return replace(shape, unit=unit, prune=f"{{after: 1, keep: {keep}}}")

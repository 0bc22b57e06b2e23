"""What is compiled before a run's first iteration, once for each shape of samples, and about how long that takes."""

from __future__ import annotations

from dataclasses import dataclass

from solrl_ray.config import compiled_learner
from solrl_ray.config.pools import is_colocated
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.config.update import passes

FORWARD, PASSES = 11.0, 22.0
"""Seconds with an empty `compile.cache`, of a worker's forward and of a kind of learner passes: the middle of 8 to 14
and of 10 to 35, which were seen on an H200.
"""


@dataclass(frozen=True, slots=True)
class Compiling:
    shapes: int
    forwards: int
    """Of an explorer and of a regenerator, which also has those of evaluations."""
    kinds: int
    """Of learner passes."""
    seconds: float
    """Until all is compiled: roles of a card one after the other, others at once."""

    @classmethod
    def of(cls, config: Config) -> Compiling:
        shapes, fleet = len(config.model.shapes), config.fleet
        wanted, previews = config.compile.enabled is not False, pool_sampling(config).tier != "nvfp4-emulated"
        probe = int(config.run.deterministic)  # one forward, at the first shape
        explorer = (shapes + probe) * (wanted and previews and fleet.explorers.num_gpus > 0)
        regenerator = (2 * shapes + probe) * (wanted and fleet.regenerators.num_gpus > 0)
        kinds = shapes * len(passes(config)) * compiled_learner.is_compiled(config)
        together = sum if is_colocated(fleet) else max
        seconds = together((explorer * FORWARD, regenerator * FORWARD, kinds * PASSES))
        return cls(shapes=shapes, forwards=explorer + regenerator, kinds=kinds, seconds=seconds)

    @property
    def words(self) -> str:
        """Empty if nothing is compiled."""
        if not self.forwards + self.kinds:
            return ""
        each = f", for {self.shapes} shapes" if self.shapes > 1 else ""
        return (
            f"{self.forwards} forwards of workers and {self.kinds} kinds of learner passes{each}, once: about "
            f"{self.seconds:,.0f} s with an empty compile.cache (estimated), a tenth of it with a filled one"
        )

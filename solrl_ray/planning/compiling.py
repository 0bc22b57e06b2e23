"""What is compiled before a run's first iteration, once for each shape of samples, and about how long that takes."""

from __future__ import annotations

from dataclasses import dataclass

from solrl_ray.config import compiled_learner
from solrl_ray.config.pools import is_colocated
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.planning.update import passes

FORWARD, DECODER, PASSES = 11.0, 70.0, 22.0
"""Seconds with an empty `compile.cache`, of a worker's forward, of a decoder, and of a kind of learner passes: of 6 to
29, of 40 to 95 and of 5 to 52 that were seen on H100s and an H200. A decoder's is what the first forward of explorers
of FLUX.1-dev took beyond that.
"""


@dataclass(frozen=True, slots=True)
class Compiling:
    shapes: int
    forwards: int
    """Of an explorer and of a regenerator, which also has those of evaluations."""
    decoders: int
    """Of explorers and of regenerators; a card has one for both."""
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
        colocated, decoded = is_colocated(fleet), shapes * (wanted and config.compile.decoder)
        decoders = (
            decoded * (fleet.explorers.num_gpus > 0),
            decoded * (fleet.regenerators.num_gpus > 0 and not colocated),
        )
        forwards = explorer * FORWARD, regenerator * FORWARD
        sampling = [one + other * DECODER for one, other in zip(forwards, decoders, strict=True)]
        return cls(
            shapes=shapes,
            forwards=explorer + regenerator,
            decoders=sum(decoders),
            kinds=kinds,
            seconds=(sum if colocated else max)([*sampling, kinds * PASSES]),
        )

    @property
    def words(self) -> str:
        """Empty if nothing is compiled."""
        if not self.forwards + self.kinds:
            return ""
        each = f", for {self.shapes} shapes" if self.shapes > 1 else ""
        forwards = f"{self.forwards} forwards of workers" + (f", {self.decoders} decoders" if self.decoders else "")
        return (
            f"{forwards} and {self.kinds} kinds of learner passes{each}, once: about "
            f"{self.seconds:,.0f} s with an empty compile.cache (estimated), a tenth of it with a filled one"
        )

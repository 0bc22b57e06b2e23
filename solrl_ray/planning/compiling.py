"""Estimates the compilations before a run's first iteration, once per sample shape, and their duration."""

from __future__ import annotations

from solrl_ray.config import compiled_learner
from solrl_ray.config.pools import is_colocated
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.planning.update import passes

FORWARD, DECODER, PASSES = 11.0, 70.0, 22.0
"""Seconds of compilation with an empty `compile.cache`, for a worker's forward, a decoder, and one kind of learner
passes. Measured on H100s and an H200: 6 to 29, 40 to 95 and 5 to 52 s. The time of a decoder is the additional time of
the explorers' first forward of FLUX.1-dev.
"""


def compiled(config: Config) -> str:
    """The plan's row on compilation; empty if nothing is compiled. A regenerator also compiles forwards of evaluations.
    Colocated roles share one decoder and compile one after the other; separate processes compile in parallel.
    """
    shapes, fleet = len(config.model.shapes), config.fleet
    wanted, previews = config.compile.enabled is not False, pool_sampling(config).tier != "nvfp4-emulated"
    probe = int(config.run.deterministic)  # one forward, at the first shape
    explorer = (shapes + probe) * (wanted and previews and fleet.explorers.num_gpus > 0)
    regenerator = (2 * shapes + probe) * (wanted and fleet.regenerators.num_gpus > 0)
    kinds = shapes * len(passes(config)) * compiled_learner.is_compiled(config)
    if not explorer + regenerator + kinds:
        return ""
    colocated, decoded = is_colocated(fleet), shapes * (wanted and config.compile.decoder)
    previewed = decoded * (fleet.explorers.num_gpus > 0)
    regenerated = decoded * (fleet.regenerators.num_gpus > 0 and not colocated)
    exploring = explorer * FORWARD + previewed * DECODER
    regenerating = regenerator * FORWARD + regenerated * DECODER
    seconds = (sum if colocated else max)([exploring, regenerating, kinds * PASSES])
    decoders = f", {previewed + regenerated} decoders" if previewed + regenerated else ""
    for_shapes = f", for {shapes} shapes" if shapes > 1 else ""
    return (
        f"{explorer + regenerator} forwards of workers{decoders} and {kinds} kinds of learner passes{for_shapes}, "
        f"once: about {seconds:,.0f} s with an empty compile.cache (estimated), a tenth of that with a filled one"
    )

"""Resolves the learner's open settings: whether its passes are compiled, and the share of activations kept for the
backward pass.

Both settings can change the kernels and therefore the bits. They are fixed when a run begins, written to its
``config.yaml`` and kept when the run is resumed. On GPUs, the kept share and possibly the micro-batch depend on the GPU
memory: `fitting.resolve_auto`.
"""

from __future__ import annotations

from solrl_ray.config.schema import Config

COMPILED, EAGER = 0.5, 0.0
"""Assumed `learner.activation_memory` if it is null and the GPU is unknown: for a compiled and an eager learner."""


def is_compiled(config: Config) -> bool:
    """Whether the learner is compiled: `compile.learner`; if that is null, True if learners have GPUs."""
    wanted = config.compile.learner
    return config.fleet.learners.num_gpus > 0 if wanted is None else wanted


def activation_memory(config: Config) -> float:
    """Share of the activations kept in memory for the backward pass, in [0, 1]; the rest is recomputed. If the share
    depends on the GPU and the GPU is unknown, an assumed value.
    """
    given = config.learner.activation_memory
    if given is not None:
        return given
    return COMPILED if is_compiled(config) else EAGER


def is_open(config: Config) -> bool:
    """Whether the kept share of activations and the micro-batch still depend on the learners' GPU."""
    on_gpus = config.fleet.learners.num_gpus > 0
    return config.learner.activation_memory is None and on_gpus and is_compiled(config)


def keeping(config: Config, share: float, micro_batch: int | None = None) -> Config:
    """The configuration with this `learner.activation_memory` and, if given, this `learner.micro_batch`."""
    batch = micro_batch or config.learner.micro_batch
    return config.changed({"learner.activation_memory": share, "learner.micro_batch": batch})


def resolve_auto(config: Config) -> Config:
    """The configuration with values for the open settings that do not depend on the GPU."""
    config = config.changed({"compile.learner": is_compiled(config)})
    return config if is_open(config) else keeping(config, activation_memory(config))


def inherit_from(given: Config, was: Config) -> Config:
    """`given`, with its null settings replaced by the values that the earlier run `was` fixed."""
    if given.compile.learner is None:
        given = given.changed({"compile.learner": was.compile.learner})
    if given.learner.activation_memory is None and was.learner.activation_memory is not None:
        given = keeping(given, was.learner.activation_memory, min(given.learner.micro_batch, was.learner.micro_batch))
    return given

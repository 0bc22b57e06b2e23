"""Whether the learner's passes are compiled, and what they keep for the backward pass: from the configuration.

Both settings may choose other kernels and so other bits. They are fixed when a run begins, written to its
``config.yaml`` and kept when it is resumed. What is kept for the backward pass on a GPU depends on its size, and so may
the size of micro-batches: `fitting.resolve_auto`.
"""

from __future__ import annotations

from solrl_ray.config.schema import Config

COMPILED, EAGER = 0.5, 0.0
"""`learner.activation_memory` where it is left open and no card is known."""


def is_compiled(config: Config) -> bool:
    """Whether the learner is compiled: `compile.learner`; if null, where learners have GPUs."""
    wanted = config.compile.learner
    return config.fleet.learners.num_gpus > 0 if wanted is None else wanted


def activation_memory(config: Config) -> float:
    """Share of the activations kept in memory for the backward pass, in [0, 1]; the rest is recomputed. Where a card
    decides it and none is known, an assumption.
    """
    given = config.learner.activation_memory
    if given is not None:
        return given
    return COMPILED if is_compiled(config) else EAGER


def is_open(config: Config) -> bool:
    """Whether the learners' card decides what is kept for the backward pass, and of how many samples at a time."""
    on_gpus = config.fleet.learners.num_gpus > 0
    return config.learner.activation_memory is None and on_gpus and is_compiled(config)


def keeping(config: Config, share: float, micro_batch: int | None = None) -> Config:
    """The configuration with this `learner.activation_memory` and, if given, this `learner.micro_batch`."""
    batch = micro_batch or config.learner.micro_batch
    return config.changed({"learner.activation_memory": share, "learner.micro_batch": batch})


def resolve_auto(config: Config) -> Config:
    """The configuration with actual values for what no card decides."""
    config = config.changed({"compile.learner": is_compiled(config)})
    return config if is_open(config) else keeping(config, activation_memory(config))


def inherit_from(given: Config, was: Config) -> Config:
    """`given` with the values that the run `was` fixed, where `given` has null."""
    if given.compile.learner is None:
        given = given.changed({"compile.learner": was.compile.learner})
    if given.learner.activation_memory is None and was.learner.activation_memory is not None:
        given = keeping(given, was.learner.activation_memory, min(given.learner.micro_batch, was.learner.micro_batch))
    return given

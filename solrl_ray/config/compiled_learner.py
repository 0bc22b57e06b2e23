"""Whether the learner's passes are compiled, and what they keep for the backward pass: from the configuration.

Both settings may choose other kernels and so other bits. They are fixed when a run begins, written to its
``config.yaml`` and kept when it is resumed.
"""

from __future__ import annotations

from solrl_ray.config.schema import Config

COMPILED, EAGER = 0.5, 0.0
"""Defaults of `learner.activation_memory`."""


def is_compiled(config: Config) -> bool:
    """Whether the learner is compiled: `compile.learner`; if null, where learners have GPUs."""
    wanted = config.compile.learner
    return config.fleet.learners.num_gpus > 0 if wanted is None else wanted


def activation_memory(config: Config) -> float:
    """Share of the activations kept in memory for the backward pass, in [0, 1]; the rest is recomputed."""
    given = config.learner.activation_memory
    if given is not None:
        return given
    return COMPILED if is_compiled(config) else EAGER


def settled(config: Config) -> Config:
    """The configuration with actual values for both settings."""
    compiling = config.compile.model_copy(update={"learner": is_compiled(config)})
    learner = config.learner.model_copy(update={"activation_memory": activation_memory(config)})
    return config.model_copy(update={"compile": compiling, "learner": learner})


def carried(given: Config, was: Config) -> Config:
    """`given` with the values that the run `was` fixed, where `given` has null."""
    if given.compile.learner is None:
        compiling = given.compile.model_copy(update={"learner": was.compile.learner})
        given = given.model_copy(update={"compile": compiling})
    if given.learner.activation_memory is None:
        learner = given.learner.model_copy(update={"activation_memory": was.learner.activation_memory})
        given = given.model_copy(update={"learner": learner})
    return given

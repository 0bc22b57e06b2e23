"""Whether the learner's passes are compiled, and what they keep for the backward pass: from the configuration.

Both settings may choose other kernels and so other bits. They are settled once, when a run begins, written to its
``config.yaml`` and kept when it is resumed.
"""

from __future__ import annotations

from solrl_ray.config.schema import Config

COMPILED, EAGER = 0.5, 0.0
"""`learner.activation_memory` where none is given."""


def is_compiled(config: Config) -> bool:
    """Whether the learner is compiled: `compile.learner`; if it is null, where learners have GPUs."""
    wanted = config.compile.learner
    return config.fleet.learners.num_gpus > 0 if wanted is None else wanted


def activation_memory(config: Config) -> float:
    """Share of the activations that a backward pass finds in memory, in [0, 1]; the rest is computed again."""
    given = config.learner.activation_memory
    if given is not None:
        return given
    return COMPILED if is_compiled(config) else EAGER


def settled(config: Config) -> Config:
    """The configuration with both settings as they will be."""
    compiling = config.compile.model_copy(update={"learner": is_compiled(config)})
    learner = config.learner.model_copy(update={"activation_memory": activation_memory(config)})
    return config.model_copy(update={"compile": compiling, "learner": learner})


def carried(given: Config, was: Config) -> Config:
    """`given` with what the run that was begun as `was` settled, where it leaves it open."""
    if given.compile.learner is None:
        compiling = given.compile.model_copy(update={"learner": was.compile.learner})
        given = given.model_copy(update={"compile": compiling})
    if given.learner.activation_memory is None:
        learner = given.learner.model_copy(update={"activation_memory": was.learner.activation_memory})
        given = given.model_copy(update={"learner": learner})
    return given

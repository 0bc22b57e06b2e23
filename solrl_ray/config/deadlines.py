"""The section `fleet.deadlines`: how long each named wait may take."""

from __future__ import annotations

from solrl_ray.config.section import AtLeastZero, Seconds, Section


class Deadlines(Section):
    """The longest that each named wait may take, seconds."""

    resources: AtLeastZero = 0.0
    """Waiting for nodes to join before any actor starts; 0: the run ends at once. Later, together with `start`: waiting
    for a worker's place. Then the worker is reported; if its pool has no other, or it is the learner group, the run
    ends.
    """

    start: Seconds = 180.0
    """An actor's construction once it has a place: imports, weights, attestation."""
    warm_up: Seconds = 900.0
    """Compiling a worker's forward for one shape, if it is compiled; minutes if `compile.cache` is empty."""
    explore: Seconds = 120.0
    """One micro-batch of previews; a unit of several gets this much for each."""
    regenerate: Seconds = 300.0
    """Regeneration, audit or evaluation of one prompt; prompts that are evaluated in one forward get this much for
    each. Also one unit of a pool in strategies of one stage.
    """
    update: Seconds = 1800.0
    """One learner update."""
    collective: Seconds = 1800.0
    """Joining the learner group; also each collective operation of ranks on CPUs, where a rank that hangs ends the run
    instead of rebuilding the group if this is shorter than `update`. On GPUs only `update` limits them.
    """
    publish: Seconds = 120.0
    """Fetching, swapping in and proving one revision; on a card, preparing for it."""
    selector: Seconds = 60.0
    """One call to the selector."""
    encode: Seconds = 60.0
    """The embedding of one prompt; a batch of several gets this much for each, as much again for each of their
    reference pictures, and `start` if it must load the text encoders again. Before the run, looking at one picture.
    """
    fetch: Seconds = 120.0
    """Fetching an answer, the samples of an iteration or their embeddings."""
    checkpoint: Seconds = 600.0
    """Writing a checkpoint to the run folder and removing old ones; also whatever else the controller reads or writes
    there: metrics, an evaluation, the report.
    """
    upload: Seconds = 600.0
    """Copying the last checkpoints and the report at the run's end, if `checkpoints.upload` is set."""
    tracking: Seconds = 120.0
    """One call to one of `tracking.trackers`, and at the run's end all open calls. A slower tracker gets nothing more;
    the run goes on.
    """

"""The vocabulary of the project: every record that crosses a process or is written to a run folder.

All records are frozen. Identifiers are plain strings and integers, so that a record means the same on every machine and
after a restart:

* a *prompt id* is the first 16 hex digits of BLAKE2b-64 over the prompt's UTF-8 text and the digests of its reference
  pictures, if it has some (`prompts.prompt_id`);
* a *unit id* names a piece of work independent of workers: ``explore/3/9f…/0-24``;
* a *revision* is the integer version of the sampling policy; revision ``t`` samples in iteration ``t`` (0-based),
  revision 0 is the initial adapter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from solrl_ray.common.tensor_serialization import Portable

if TYPE_CHECKING:  # takes seconds; only types need it here
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Names one stream of random numbers. Equal addresses give equal numbers everywhere (design law 2)."""

    run_seed: int
    purpose: str
    """Use of the numbers: ``initial-noise``, ``training-noise``, ``timesteps``, ``prompts``, …"""
    iteration: int = 0
    prompt_id: str = ""
    index: int = 0
    """Index of the candidate inside its prompt's pool."""
    step: int = 0


@dataclass(frozen=True, slots=True, order=True)
class SampleShape:
    """The size of a sample, pixels."""

    height: int
    width: int
    frames: int = 0
    """Of a video; 0: a picture."""

    @property
    def dims(self) -> tuple[int, ...]:
        """Of a tensor, after the channels: height and width, before them the frames of a video."""
        return (self.frames, self.height, self.width) if self.frames else (self.height, self.width)

    @property
    def pixels(self) -> int:
        """Of the whole picture, or of one frame."""
        return self.height * self.width

    @property
    def volume(self) -> int:
        """Pixels of all frames."""
        return self.pixels * (self.frames or 1)

    def is_size_of(self, other: SampleShape) -> bool:
        """Whether a picture of this shape is as large as a frame of the other."""
        return (self.height, self.width) == (other.height, other.width)

    def __str__(self) -> str:
        """``512 px``, ``512 x 768 px`` (height first), or ``480 x 832 px, 49 frames``."""
        size = f"{self.height} px" if self.height == self.width else f"{self.height} x {self.width} px"
        return f"{size}, {self.frames} frames" if self.frames else size


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A picture that belongs to a prompt, such as the one to be edited."""

    path: str
    """Its file, on the machine that has the prompts."""
    digest: str
    """SHA-256 (hex) of the file's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    id: str
    text: str
    references: tuple[Reference, ...] = ()
    shape: SampleShape | None = None
    """Of its samples, if its file names one; see `prompts.prompt_set.shape_of`."""


NEGATIVE = "negative_"
"""Begins the names of a negative prompt's tensors, as in diffusers."""
REFERENCES = "references"
"""Name of an embedding's reference pictures, uint8 [n, 3, H, W], which rewards see."""
REFERENCE_TOKENS = "reference_tokens"
"""Name of what the transformer sees of them: their latents, packed like those of a sample, [n · tokens, channels]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEmbedding(Portable):
    """The text encoders' output for one prompt. Tensors have no batch dimension and are on the CPU."""

    prompt_id: str
    tensors: dict[str, torch.Tensor]
    """Family-specific, by name: FLUX has ``prompt_embeds`` [tokens, width] and ``pooled_prompt_embeds`` [width]. Those
    of a negative prompt begin with `NEGATIVE`. With reference pictures also `REFERENCES` and `REFERENCE_TOKENS`.
    """
    digest: str
    """SHA-256 over names, dtypes, shapes and bytes; with a negative prompt over both digests."""

    @property
    def references(self) -> torch.Tensor | None:
        """The prompt's pictures at the size of the samples, uint8 [n, 3, H, W]; None if it has none."""
        return self.tensors.get(REFERENCES)

    def against(self, negative: PromptEmbedding) -> PromptEmbedding:
        """This embedding with the tensors of a negative prompt."""
        digest = hashlib.sha256(f"{self.digest}\n{negative.digest}".encode()).hexdigest()
        seen = {name: tensor for name, tensor in negative.tensors.items() if name != REFERENCES}
        others = {NEGATIVE + name: tensor for name, tensor in seen.items()}
        return PromptEmbedding(prompt_id=self.prompt_id, tensors=self.tensors | others, digest=digest)


@dataclass(frozen=True, slots=True)
class Pruning:
    """Pruning of a unit of previews: all members take the first steps, and only the most extreme continue."""

    after: int
    """Solver steps after which the estimates of x0 are scored."""
    keep: int
    """How many members continue: even, half of them the best by these early scores and half the worst."""


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """A fixed set of seeds of one prompt, in evaluations of several: one call, one answer. Its members are ``indices``,
    sampled in micro-batches of one shape; a score is a function of the unit alone.
    """

    stage: str
    """The method to call on a worker. Explorers: ``explore``, or ``sample`` in a strategy that learns from the pool's
    own samples. Regenerators: ``regenerate`` (the chosen seeds of a prompt) and ``evaluate``.
    """
    iteration: int
    revision: int
    prompt_id: str
    indices: tuple[int, ...]
    policy: str = "old"
    """The policy of the revision: the sampling policy, or in evaluations another one; ``real`` for real pictures."""
    prune: Pruning | None = None
    """For a preview, if not all members are sampled to the end."""
    beside: tuple[str, ...] = ()
    """Of an evaluation: further prompts, whose samples of the same indices are in the same forward."""

    def __reduce__(self) -> tuple[Callable[..., WorkUnit], tuple[Any, ...]]:
        """By position, in a third of the time of a dataclass's own way: an iteration may have 100,000."""
        return WorkUnit, _VALUES_OF_UNIT(self)

    @property
    def id(self) -> str:
        first, last = self.indices[0], self.indices[-1]
        policy = "" if self.policy == "old" else f"/{self.policy}"
        beside = f"+{len(self.beside)}" if self.beside else ""
        return f"{self.stage}/{self.iteration}/{self.prompt_id}{beside}/{first}-{last}{policy}"

    def describe(self) -> str:
        """For messages: ``explore (iteration 3, prompt 88fda0ff22421a62, seeds 0 to 95)``; iterations from 1."""
        when = f"after {self.iteration} updates" if self.stage == "evaluate" else f"iteration {self.iteration + 1}"
        first, last, count = self.indices[0], self.indices[-1], len(self.indices)
        seeds = f"seeds {first} to {last}" if last - first == count - 1 > 0 else f"{count} of its seeds"
        beside = f" and {len(self.beside)} more" if self.beside else ""
        return f"{self.stage} ({when}, prompt {self.prompt_id}{beside}, {seeds})"


_VALUES_OF_UNIT: Callable[[WorkUnit], tuple[Any, ...]] = attrgetter(*(field.name for field in fields(WorkUnit)))
"""The values of all fields of a unit, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The numbers of several samples, all float32 values: a column per field, which has a value per sample, or none.

    For another number per sample, add a field here and fill it in `rollout.sampler`. Digests, checks, the journal and
    stored groups take every column.
    """

    rewards: tuple[float, ...]
    """The reward that each sample is ranked or learned from by. For a pruned preview: its early score."""
    components: tuple[tuple[float, ...], ...] = field(default=(), metadata={"nested": True})
    """Each reward's own value, if they are summed with their own statistics (`objectives.gdpo`). For a pruned preview:
    those of its early score.
    """
    early: tuple[float, ...] = ()
    """For a pruned unit: the score of each member's estimate of x0, which decided which ones continue. With
    `components`: their normalized sums inside the unit.
    """

    @property
    def columns(self) -> dict[str, Any]:
        """By name, as arguments of another record with scores."""
        return {each.name: getattr(self, each.name) for each in fields(Scores)}

    @property
    def numbers(self) -> tuple[float, ...]:
        """All of them, column by column."""
        return tuple(number for column in self.columns.values() for number in flat(column))


def flat(column: Iterable[Any]) -> Iterator[float]:
    """The numbers of a column of `Scores`, which has one or several per sample."""
    for value in column:
        yield from value if isinstance(value, tuple) else (value,)


def scores_of(rows: Sequence[tuple[Scores, int]]) -> Scores:
    """The numbers of samples that are each a row of a record."""
    names = (each.name for each in fields(Scores))
    return Scores(**{name: tuple(its[row] for each, row in rows if (its := getattr(each, name))) for name in names})


_MOMENTARY: Mapping[str, bool] = {"kept": False}
"""Marks a field that only a live run reads, so that the journal leaves it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitResult(Scores):
    """The answer to a unit: the scores of its indices. For a preview nothing else; the samples of a ``sample`` unit
    stay in the object store.
    """

    unit: WorkUnit
    worker: str
    score_class: str
    """Digest of all that fixes the bits of a score: device type, tier, library versions, shape, threads."""
    seconds: float
    started: float = field(default=0.0, metadata=_MOMENTARY)
    """Start of computing: seconds since 1970, by the worker's clock. Only the trace reads it."""
    samples_digest: str = ""
    """For a ``sample`` unit: digest of its samples (`scheduling.iteration_state.group_digest`)."""
    reward_costs: Mapping[str, int] | None = field(default=None, metadata=_MOMENTARY)
    """Its use of reward servers and judges: see `IterationMetrics.reward_costs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    prompt_id: str
    index: int
    reward: float
    """Ranks the pool; for a preview, a proxy that only ranks (design law 1). Of several rewards with their own
    statistics: their normalized sum in the pool (`objectives.gdpo`).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The seeds of one prompt to be trained on, in two halves (`config.selection_rules`): ``top`` in falling,
    ``bottom`` in rising order of rewards.

    The journal has it for readers. A resumed run selects again, from the journal's results.
    """

    iteration: int
    revision: int
    prompt_id: str
    top: tuple[Candidate, ...]
    bottom: tuple[Candidate, ...]

    @property
    def chosen(self) -> tuple[Candidate, ...]:
        return self.top + self.bottom


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(Portable):
    """Consecutive states of a stochastic sampler, for objectives that learn from its transitions."""

    states: torch.Tensor
    """float32 [samples, transitions + 1, *latent_shape], on the CPU."""
    first_step: int
    """Step of the full schedule of the first transition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup(Portable, Scores):
    """The chosen samples of one prompt: all that a learner sees of a rollout. For a ``sample`` unit, all samples. Their
    scores are those of the full-precision images.
    """

    iteration: int
    revision: int
    prompt_id: str
    indices: tuple[int, ...]
    """Candidate indices, in the selection's order (top, then bottom)."""
    latents: torch.Tensor
    """Clean latents x0, float32 [len(indices), *latent_shape], on the CPU."""
    shape: SampleShape | None = None
    """Of its samples, in a run with several shapes; None: the only one."""
    trajectory: Trajectory | None = None
    """Only if the objective needs it."""
    seconds: float = 0.0
    worker: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A worker's proof that it holds a revision (design law 4)."""

    worker: str
    role: str
    revision: int
    score_class: str
    policy: str
    """``old``, the sampling policy, or another one published for evaluation."""
    bound_modules: int
    """Number of LoRA-touched modules overwritten."""
    buffer_digest: str
    """`weight_sync.checksums.tensors_digest` of the touched modules' buffers."""
    probe_digest: str
    """Digest of the output of one fixed forward."""
    reproducible: bool = True
    """Whether this worker's kernels give the same bits each time: on a CPU yes, on a GPU with ``run.deterministic``."""
    seconds: float = 0.0
    """Time for verifying, swapping in and proving, in which the worker was idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A worker's answer to a revision that it cannot take as sent: it needs it once more, with the factors."""

    worker: str
    reason: str
    """In words: a damaged payload, or factors that the learner of its card does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attestation:
    """What a worker really computes with, established by tests at its start (design law 5)."""

    worker: str
    device: str
    tier: str
    score_class: str
    checks: dict[str, str]
    """Name of each check → result, e.g. ``known-answer vectors`` → ``17 of 17``."""
    quantized_layers: int = 0
    skipped_layers: int = 0
    warm_ups: int = 0
    """Shapes of a forward still to be compiled, before the first revision is loaded."""

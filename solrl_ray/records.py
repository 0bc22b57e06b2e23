"""The records that are sent between processes or written to a run folder.

All records are frozen. Identifiers are plain strings and integers, so a record means the same on every machine and
after a restart:

* a *prompt id* is the first 16 hex digits of BLAKE2b-64 over the prompt's UTF-8 text and the digests of its reference
  images, if it has any (`prompts.prompt_id`);
* a *unit id* names a work unit independently of workers: ``explore/3/9f…/0-24``;
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

if TYPE_CHECKING:  # the import takes seconds; only type annotations need it here
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The name of one stream of random numbers. Equal addresses give equal numbers everywhere (design law 2)."""

    run_seed: int
    purpose: str
    """Use of the numbers: ``initial-noise``, ``training-noise``, ``timesteps``, ``prompts``, …"""
    iteration: int = 0
    prompt_id: str = ""
    index: int = 0
    """Index of the candidate in its prompt's pool."""
    step: int = 0


@dataclass(frozen=True, slots=True, order=True)
class SampleShape:
    """The size of an image or video, pixels."""

    height: int
    width: int
    frames: int = 0
    """Number of frames of a video; 0 for an image."""

    @property
    def dims(self) -> tuple[int, ...]:
        """Dimensions of a tensor after the channels: (height, width), or (frames, height, width) for a video."""
        return (self.frames, self.height, self.width) if self.frames else (self.height, self.width)

    @property
    def pixels(self) -> int:
        """Pixels of the image, or of one frame."""
        return self.height * self.width

    @property
    def volume(self) -> int:
        """Pixels of all frames."""
        return self.pixels * (self.frames or 1)

    def is_size_of(self, other: SampleShape) -> bool:
        """Whether height and width are those of `other`, so that an image has the size of a frame."""
        return (self.height, self.width) == (other.height, other.width)

    def __str__(self) -> str:
        """``512 px``, ``512 x 768 px`` (height first), or ``480 x 832 px, 49 frames``."""
        size = f"{self.height} px" if self.height == self.width else f"{self.height} x {self.width} px"
        return f"{size}, {self.frames} frames" if self.frames else size


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A reference image of a prompt, such as the image to be edited."""

    path: str
    """Its file, on the machine with the prompts."""
    digest: str
    """SHA-256 (hex) of the file's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    id: str
    text: str
    references: tuple[Reference, ...] = ()
    shape: SampleShape | None = None
    """Shape of its samples, if the prompt file names one; see `prompts.prompt_set.shape_of`."""


NEGATIVE = "negative_"
"""Prefix of the names of a negative prompt's tensors, as in diffusers."""
REFERENCES = "references"
"""Name of the tensor with an embedding's reference images, uint8 [n, 3, H, W], the input of rewards."""
REFERENCE_TOKENS = "reference_tokens"
"""Name of the tensor with the latents of reference images, the transformer's input: [n · tokens, channels], packed like
those of a sample.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEmbedding(Portable):
    """The text encoders' output for one prompt. Tensors have no batch dimension and are on the CPU."""

    prompt_id: str
    tensors: dict[str, torch.Tensor]
    """Tensors by name; they depend on the model family. FLUX has ``prompt_embeds`` [tokens, width] and
    ``pooled_prompt_embeds`` [width]. Names of a negative prompt's tensors begin with `NEGATIVE`. With reference images
    there are also `REFERENCES` and `REFERENCE_TOKENS`.
    """
    digest: str
    """SHA-256 over names, dtypes, shapes and bytes; with a negative prompt, over both digests."""

    @property
    def references(self) -> torch.Tensor | None:
        """The prompt's reference images at the size of the samples, uint8 [n, 3, H, W]; None if it has none."""
        return self.tensors.get(REFERENCES)

    def against(self, negative: PromptEmbedding) -> PromptEmbedding:
        """This embedding plus the tensors of a negative prompt."""
        digest = hashlib.sha256(f"{self.digest}\n{negative.digest}".encode()).hexdigest()
        seen = {name: tensor for name, tensor in negative.tensors.items() if name != REFERENCES}
        others = {NEGATIVE + name: tensor for name, tensor in seen.items()}
        return PromptEmbedding(prompt_id=self.prompt_id, tensors=self.tensors | others, digest=digest)


@dataclass(frozen=True, slots=True)
class Pruning:
    """Pruning of a unit of previews: all members make the first steps, and only the most extreme ones continue."""

    after: int
    """Number of solver steps after which the estimates of x0 are scored."""
    keep: int
    """Number of members that continue, even: half of them have the best early scores, half the worst."""


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """A fixed set of seeds of one prompt (in evaluations, of several prompts): one call, one answer.

    Its members are ``indices``, sampled in micro-batches of one shape. A score is a function of the unit alone.
    """

    stage: str
    """The method to call on a worker. Explorers have ``explore``, and ``sample`` for strategies that train on samples
    of the pool. Regenerators have ``regenerate`` (the chosen seeds of a prompt) and ``evaluate``.
    """
    iteration: int
    revision: int
    prompt_id: str
    indices: tuple[int, ...]
    policy: str = "old"
    """The policy of the revision: the sampling policy, or another one in evaluations; ``real`` for real images."""
    prune: Pruning | None = None
    """Pruning of previews; None if all members are sampled to the end."""
    beside: tuple[str, ...] = ()
    """For an evaluation: further prompts; their samples of the same indices are in the same forward."""

    def __reduce__(self) -> tuple[Callable[..., WorkUnit], tuple[Any, ...]]:
        """Pickle by position, three times as fast as a dataclass's default: an iteration may have 100,000 units."""
        return WorkUnit, _VALUES_OF_UNIT(self)

    @property
    def id(self) -> str:
        first, last = self.indices[0], self.indices[-1]
        policy = "" if self.policy == "old" else f"/{self.policy}"
        beside = f"+{len(self.beside)}" if self.beside else ""
        return f"{self.stage}/{self.iteration}/{self.prompt_id}{beside}/{first}-{last}{policy}"

    def describe(self) -> str:
        """Name for messages: ``explore (iteration 3, prompt 88fda0ff22421a62, seeds 0 to 95)``.

        Iterations count from 1.
        """
        when = f"after {self.iteration} updates" if self.stage == "evaluate" else f"iteration {self.iteration + 1}"
        first, last, count = self.indices[0], self.indices[-1], len(self.indices)
        seeds = f"seeds {first} to {last}" if last - first == count - 1 > 0 else f"{count} of its seeds"
        beside = f" and {len(self.beside)} more" if self.beside else ""
        return f"{self.stage} ({when}, prompt {self.prompt_id}{beside}, {seeds})"


_VALUES_OF_UNIT: Callable[[WorkUnit], tuple[Any, ...]] = attrgetter(*(field.name for field in fields(WorkUnit)))
"""Returns the values of all fields of a unit, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores of several samples, all float32 values. Each field is a column: one entry per sample, or empty.

    To add a number per sample, add a field here and fill it in `rollout.sampler`. Digests, checks, the journal and
    stored groups include every column.
    """

    rewards: tuple[float, ...]
    """Reward of each sample, for ranking or training. For a dropped preview: its early score."""
    components: tuple[tuple[float, ...], ...] = field(default=(), metadata={"nested": True})
    """Value of each single reward, if each has its own statistics (`objectives.gdpo`). For a dropped preview: those of
    its early scoring.
    """
    early: tuple[float, ...] = ()
    """For a pruned unit: the score of each member's estimate of x0, which decides which members continue. With
    `components`: sums of rewards normalised within the unit.
    """

    @property
    def columns(self) -> dict[str, Any]:
        """Columns by name, as arguments of another record with scores."""
        return {column.name: getattr(self, column.name) for column in fields(Scores)}

    @property
    def numbers(self) -> tuple[float, ...]:
        """All numbers, column by column."""
        return tuple(number for column in self.columns.values() for number in flat(column))


def flat(column: Iterable[Any]) -> Iterator[float]:
    """The numbers of a column of `Scores`, whose entries are numbers or tuples of numbers."""
    for value in column:
        yield from value if isinstance(value, tuple) else (value,)


def scores_of(rows: Sequence[tuple[Scores, int]]) -> Scores:
    """The scores of samples, each given as a record and a row in it."""
    names = (column.name for column in fields(Scores))
    return Scores(**{name: tuple(col[row] for scores, row in rows if (col := getattr(scores, name))) for name in names})


_MOMENTARY: Mapping[str, bool] = {"kept": False}
"""Metadata of a field that only a live run reads; the journal omits it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitResult(Scores):
    """The answer to a unit: the scores of its indices. Samples of a ``sample`` unit stay in the object store."""

    unit: WorkUnit
    worker: str
    score_class: str
    """Digest of everything that determines the bits of a score: device type, tier, library versions, shape, threads."""
    seconds: float
    started: float = field(default=0.0, metadata=_MOMENTARY)
    """Start of the computation: seconds since 1970, by the worker's clock. Only the trace reads it."""
    samples_digest: str = ""
    """For a ``sample`` unit: digest of its samples (`scheduling.iteration_state.group_digest`)."""
    reward_costs: Mapping[str, int] | None = field(default=None, metadata=_MOMENTARY)
    """Use of reward servers and judges; see `IterationMetrics.reward_costs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    prompt_id: str
    index: int
    reward: float
    """The number that ranks the pool; for a preview, a proxy that is used for nothing else (design law 1). If each
    reward has its own statistics: the sum of rewards normalised in the pool (`objectives.gdpo`).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The seeds of one prompt to train on, in two halves (`config.selection_rules`).

    ``top`` is in descending, ``bottom`` in ascending order of rewards. The journal stores selections only for human
    readers: a resumed run selects again, from the journal's results.
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
    """Consecutive states of a stochastic sampler, for objectives on its transitions."""

    states: torch.Tensor
    """float32 [samples, transitions + 1, *latent_shape], on the CPU."""
    first_step: int
    """Step of the full schedule at which the first transition begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup(Portable, Scores):
    """The chosen samples of one prompt (for a ``sample`` unit, all samples): the learner's only input from a rollout.

    The scores are those of the full-precision images.
    """

    iteration: int
    revision: int
    prompt_id: str
    indices: tuple[int, ...]
    """Candidate indices, in the selection's order (top, then bottom)."""
    latents: torch.Tensor
    """Clean latents x0, float32 [len(indices), *latent_shape], on the CPU."""
    shape: SampleShape | None = None
    """Shape of the samples; None if the run has only one."""
    trajectory: Trajectory | None = None
    """Trajectories of the samples, if the objective needs them."""
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
    """Number of modules with LoRA factors whose weights were overwritten."""
    buffer_digest: str
    """`weight_sync.checksums.tensors_digest` of these modules' buffers."""
    probe_digest: str
    """Digest of the output of a fixed forward."""
    reproducible: bool = True
    """Whether this worker's kernels give the same bits each time: on a CPU, and on a GPU with ``run.deterministic``."""
    seconds: float = 0.0
    """Time to verify, load and prove the weights; the worker was idle meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A worker's answer to a revision that it cannot load as sent: it must be sent again, with the factors."""

    worker: str
    reason: str
    """Message: the payload is damaged, or the learner on the same GPU does not hold the factors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attestation:
    """The arithmetic that a worker really uses, measured by tests at its start (design law 5)."""

    worker: str
    device: str
    tier: str
    score_class: str
    checks: dict[str, str]
    """Name of each check → result, e.g. ``known-answer vectors`` → ``17 of 17``."""
    quantized_layers: int = 0
    skipped_layers: int = 0
    warm_ups: int = 0
    """Number of forward shapes still to be compiled, before the first revision is loaded."""

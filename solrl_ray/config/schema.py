"""The one typed schema of a run: every section and key with its type, bounds and default. YAML parts merge into it;
unknown keys are refused (see `config.loading`).

A field's docstring states its unit and the source of its default.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PrivateAttr

from solrl_ray.common.own_code import OwnCode
from solrl_ray.config.fleet import FleetConfig
from solrl_ray.config.guidance import Cfg
from solrl_ray.config.objectives import DiffusionNftConfig, ObjectiveConfig
from solrl_ray.config.previews import PreviewConfig
from solrl_ray.config.resolution import Resolution, Shapes, as_shapes
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.config.samplers import Ode, SamplerConfig
from solrl_ray.config.section import AboveZero, AtLeastZero, Location, Natural, Positive, Section, ShareOrZero, Workers
from solrl_ray.config.selection_rules import SelectionKind

KINDS = (("objective",), ("rollout", "sampler"))
"""Sections whose keys depend on their ``kind``."""
Beta = Annotated[float, Field(ge=0, lt=1)]
Strategy = Literal["direct", "scaled", "quantized", "two_stage"]
Precision = Literal["auto", "nvfp4", "fp8", "nvfp4-emulated", "bf16", "float32"]


class RunConfig(Section):
    name: str = "run"
    """Name of the run; its folder is ``<root>/<name>``."""
    root: Location = "runs"
    """Folder that holds run folders."""
    seed: Natural = 42
    """The run seed: part of every random address."""
    iterations: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    """Iterations to train; each ends with an update of `learner.updates` × `learner.epochs` optimiser steps."""
    deterministic: bool = False
    """Whether GPUs use kernels with the same bits each time, at a cost; CPUs always do. Part of the score class."""
    on_collapse: Literal["warn", "stop", "rollback"] = "warn"
    """What follows if an evaluation on the way (`evaluation.every`) finds that held-out reward has fallen by more than
    its error allows: a warning, the end of the run, or going on from the best evaluated checkpoint with half of the
    learning rate. Decided after the next update.
    """
    init: str = ""
    """Where the first policy is from: a run folder, one of its checkpoints, or a LoRA file; empty: the base model."""
    init_digest: str = ""
    """LoRA digest of the factors in `init`. The run writes it when it begins; a given one must match."""


class Lora(Section):
    rank: Positive = 32
    """Columns of a factor: a layer [out, in] gets A [rank, in] and B [out, rank]."""
    alpha: AboveZero = 64.0
    """LoRA scaling is alpha / rank."""
    targets: list[str]
    """Module-name suffixes that receive LoRA factors, as in PEFT's `target_modules`."""

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


class QuantizationScope(Section):
    skip: list[str] = []
    """Linears whose module path contains one of these stay unquantised; ``^`` marks its start: ``^proj_out``."""
    min_features: Natural = 0
    """Linears with max(in_features, out_features) <= this stay unquantised."""


class SigmaSchedule(Section):
    kind: Literal["linear", "shift", "flow_shift", "flux", "flux2"]
    """``linear``: 1 → 0 in equal steps. ``shift``: SD3's double-shifted grid. ``flow_shift``: shifted once, as the
    published schedulers of video models do it. ``flux``: exponential shift by mu. ``flux2``: the same with the mu of
    FLUX.2, which also depends on the number of steps.
    """
    shift: AboveZero = 3.0
    """Constant of ``shift`` and ``flow_shift``."""
    base_shift: float = 0.5
    """``flux``: mu at `base_tokens` image tokens."""
    max_shift: float = 1.15
    """``flux``: mu at `max_tokens` image tokens."""
    base_tokens: Positive = 256
    """``flux``: image tokens at which mu is `base_shift`."""
    max_tokens: Positive = 4096
    """``flux``: image tokens at which mu is `max_shift`; between them mu is linear."""
    terminal: Annotated[float, Field(gt=0, lt=1)] | None = None
    """``flux``: noise level to which the start of the last step is stretched; null: it is not."""


class Decoding(Section):
    """How latents become images. It fixes their bits, so it never depends on free memory."""

    micro_batch: Natural = 0
    """Images decoded at once; 0: all of a forward's."""
    tiling: bool = False
    """Decode in overlapping tiles: less memory at high resolutions, with seams blended."""


class Model(Section):
    family: str
    """A name in `solrl_ray.models.FAMILIES`."""
    path: Location
    """Folder or Hugging Face id of a diffusers pipeline; ``builtin:testbed/pipeline`` is shipped."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of everything that is not quantised: the "full precision" tier."""
    resolution: Resolution
    """Pixels of the images: the side of a square, ``[height, width]``, or a list of such pairs, of which each prompt
    has one: that which its file names, else an addressed draw.
    """
    frames: Annotated[int, Field(ge=2)] | None = None
    """Frames of a video, for families that make videos; null: pictures. Wan's are 1 + a multiple of 4."""
    fps: Positive = 16
    """Frames a second with which clips are played; 16 of Wan 2.1, 24 of Wan 2.2 TI2V."""
    max_sequence_length: Positive
    """Tokens of the long text encoder (T5, Gemma, Qwen)."""
    references: Natural = 0
    """Reference pictures of each prompt, for models that edit. They are brought to the size of the samples."""
    guidance: AtLeastZero = 1.0
    """Value fed to the guidance embedding, for models that have one (FLUX.1-dev); 1 for others."""
    cfg: Cfg = Cfg()
    """Of all samples. `docs/reference/objectives.md` says what an objective trains with it."""
    schedule: SigmaSchedule
    lora: Lora
    quantization: QuantizationScope = QuantizationScope()
    preview_decoder: str = ""
    """Folder or Hugging Face id of a small autoencoder (TAESD) that explorers decode with; empty: the VAE."""
    decoding: Decoding = Decoding()

    def describe_guidance(self) -> str:
        """``embedded 3.5, scale 4.5 against "blurry"``: both guidances, as far as they are not 1; empty without."""
        embedded = f"embedded {self.guidance:g}" if self.guidance != 1 else ""
        return ", ".join(filter(None, (embedded, self.cfg.describe())))

    @property
    def shapes(self) -> Shapes:
        """Of samples; all of a prompt have the same one."""
        return as_shapes(self.resolution).with_frames(self.frames or 0)

    @property
    def unguided(self) -> Model:
        """The model with the velocity of the prompt alone."""
        return self.model_copy(update={"cfg": Cfg()})


class Prompts(Section):
    train: Location
    """Text (one prompt a line) or JSONL (key ``text``; with `model.references` also ``reference``, a picture's path or
    a list of them); ``builtin:`` paths are inside the package.
    """
    heldout: Location
    """Prompts of the evaluation; must not share a prompt with `train`."""


class ExploreConfig(Section):
    steps: Positive = 6
    """Solver steps of a preview."""
    micro_batch: Positive = 24
    """Images of one forward: divides `rollout.pool`. If it is not given and previews are pruned, it is 12."""
    precision: Precision = "auto"
    """Tier of the explorers. ``auto``: on GPUs the fastest with kernels for the cards (nvfp4, else fp8, else none), on
    CPUs nvfp4-emulated; the start prints it.
    """


class RegenerateConfig(Section):
    steps: Positive = 10
    """Solver steps of a regenerated sample."""
    micro_batch: Positive = 24
    """Images of one regeneration forward; the last one of a prompt is padded."""


class RolloutConfig(Section):
    strategy: Strategy = "two_stage"
    """``two_stage``: low-precision previews rank, and the chosen seeds are sampled again in full precision. The others
    have one stage, with `regenerate` steps: ``direct`` trains on the whole pool, ``scaled`` on its extremes,
    ``quantized`` on extremes sampled at `explore.precision`.
    """
    accept_quantized_training: bool = False
    """Must be true for ``quantized``, a baseline that trains on low-precision samples and is known to be bad."""
    prompts: Positive = 48
    """Prompts of one iteration."""
    pool: Positive = 96
    """N: candidate seeds per prompt."""
    keep: Positive = 24
    """K: seeds per prompt that are regenerated and trained on; even, half best and half worst."""
    selection: SelectionKind = "best_worst"
    """Which K seeds of a pool ``two_stage`` regenerates. ``best`` and ``random`` (an addressed draw) are for
    comparison: they lose the contrast that the method learns from.
    """
    max_staleness: Literal[0, 1] = 0
    """Revisions that explorers are behind. With 1 they explore the next iteration, with the revision before, while the
    present one is regenerated and learned from. Training samples are never stale.
    """
    solver: Literal["euler", "dpm2"] = "dpm2"
    """Solver of the ODE, for the sampler ``ode`` and every evaluation; ``dpm2`` is DPM-Solver++(2M)."""
    sampler: SamplerConfig = Ode()
    explore: ExploreConfig = ExploreConfig()
    preview: PreviewConfig = PreviewConfig()
    regenerate: RegenerateConfig = RegenerateConfig()


class Fidelity(Section):
    """How rank fidelity is measured, and what a low one triggers. Measuring changes neither selection nor learning."""

    measure: Literal["spearman", "kendall"] = "spearman"
    """What is compared with `floor`: an iteration's mean over prompts, on the regenerated seeds."""
    floor: Annotated[float, Field(gt=-1, lt=1)] | None = None
    """Least value of `measure`, between -1 and 1; null: no limit."""
    patience: Positive = 3
    """Iterations in a row below `floor` that trigger `on_low`."""
    on_low: Literal["warn", "stop"] = "warn"
    """``warn`` prints which keys to change, once each time the measure falls; ``stop`` ends the run with that sentence,
    after its checkpoint.
    """


class OptimizerConfig(Section):
    """AdamW, as in PyTorch."""

    lr: AboveZero = 3e-4
    """Learning rate; `learner.schedule` changes it."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: AboveZero = 1e-8
    """Added to the denominator of a step."""
    weight_decay: AtLeastZero = 1e-4
    """Decoupled weight decay of the LoRA factors."""


class Schedule(Section):
    """How the learning rate rises to `optimizer.lr` and falls from it. By default it is constant."""

    warmup: Natural = 0
    """Optimiser steps in which it rises: the s-th has s / warmup of it."""
    decay: Literal["none", "linear", "cosine", "inverse_sqrt"] = "none"
    """How the rate falls after the warm-up: not at all, in a straight line, by half a cosine, or as
    1 / sqrt(1 + s / steps) after s steps, which needs no planned end.
    """
    steps: Natural = 0
    """Length of the fall in optimiser steps; for ``inverse_sqrt`` the number after which the rate is 0.71 of
    `optimizer.lr`. It is a third of it after 8 times as many.
    """
    floor: ShareOrZero = 0.0
    """Share of `optimizer.lr` that stays after the fall."""


class LearnerConfig(Section):
    world_size: Workers = 1
    """Ranks of the learner group, which share the optimiser's state (ZeRO-1). Fixes the LoRA digest."""
    micro_batch: Positive = 12
    """Samples of one forward and backward; at most so many if `activation_memory` is null: the card decides both."""
    updates: Positive = 1
    """Equal shares of an iteration's prompts, of an optimiser step each; divides `rollout.prompts`."""
    epochs: Positive = 1
    """How often an iteration's samples are trained on, each time in `updates` optimiser steps and, where they are
    noised, with other noise at other levels. More than 1 needs an objective with a `clip_range`.
    """
    gradient_clip: AtLeastZero = 1.0
    """Largest global gradient norm; 0: no clipping."""
    activation_memory: ShareOrZero | None = None
    """Share of the activations that a forward keeps for the backward pass; the rest is recomputed, which takes less
    memory and more time. Without compilation 0 or 1. null: for a compiled learner the first of 1, 0.5 and 0 that
    leaves room on its card, with a smaller `micro_batch` if that keeps the card busy, decided when the run begins; else
    0. Fixes the LoRA digest together with `compile.learner` and `micro_batch`.
    """
    ema_cap: ShareOrZero = 0.9
    """EMA decay is min((1 + s) / (10 + s), cap) after update s."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: Schedule = Schedule()

    @property
    def optimizer_steps(self) -> int:
        """Of an iteration."""
        return self.updates * self.epochs


class Publish(Section):
    """How a new policy revision reaches the explorers. Regenerators always merge its factors themselves."""

    mode: Literal["packed", "lora"] = "packed"
    """How explorers without a card get it. ``packed``: quantised by the learner ranks. ``lora``: they get the factors,
    merge and quantise them, and must arrive at the same bytes; less to send, and more memory for the base.
    """


class EvaluationConfig(Section):
    every: Natural = 0
    """Iterations between evaluations on held-out prompts; 0: only before the first and after the last. They run beside
    the next update, in `colocated` placement after it.
    """
    prompts: Positive = 64
    """Held-out prompts used, at most: the first ones of the file, or all of a shorter one."""
    samples: Positive = 4
    """Fixed addresses per prompt."""
    micro_batch: Natural = 0
    """Samples in one forward, of as many whole prompts as fit, and of one at least. A larger one keeps a GPU busier
    where the model or `samples` is small. It changes the last bits of a score.
    """
    steps: Positive = 10
    """Solver steps of an evaluated sample."""
    guidance: AtLeastZero | None = None
    """As `model.guidance`, for evaluated samples; null: that one."""
    cfg: Cfg | None = None
    """As `model.cfg`, for evaluated samples, also if the run trains without; null: that one."""
    pictures: Natural = 8
    """Prompts of the before/after image grid, at most."""
    reference: str = ""
    """Optional function, ``module:function`` or ``file.py:function``, that draws a real picture for a prompt (and for
    its references, if a parameter is named `reference` or `references`). Its reward is `reward_real`.
    """
    _own: OwnCode | None = PrivateAttr(default=None)

    @property
    def prompts_at_once(self) -> int:
        """Prompts whose samples share a forward."""
        return max(1, min(self.prompts, self.micro_batch // self.samples))


class Compile(Section):
    """What is compiled. Part of the score class of explorers and regenerators."""

    enabled: bool | None = None
    """Explorers and regenerators compile the transformer's blocks one by one; null: on a GPU yes, on a CPU no."""
    learner: bool | None = None
    """Learners compile the blocks, forward and backward; null: if `fleet.learners` have GPUs. Fixes the LoRA digest."""
    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """As in `torch.compile`; kernels chosen by timing them may differ from run to run."""
    decoder: bool = False
    """Compile the decoder as well, where the transformer is compiled or (tier ``nvfp4-emulated``) would be: faster
    images for a longer start.
    """
    cache: str = ""
    """Folder of compiled code, kept between runs; empty: ``solrl_ray/compiled`` in the user's cache folder."""


class Checkpoints(Section):
    keep: Positive = 2
    """Newest checkpoints kept; older ones are removed."""
    every: Natural = 0
    """Every n-th checkpoint is kept for good; 0: none."""
    upload: str = ""
    """Path or fsspec URL (``s3://bucket/folder``) to which checkpoints are copied in the background, below the run's
    name. Put credentials in the provider's own environment variables or files, not here.
    """
    min_free_gb: AtLeastZero = 0.2
    """Free space that the run folder's disk must have at the start, GB."""


class TrackingConfig(Section):
    """TensorBoard's events are always written. If a tracker fails, the run says so and goes on."""

    trackers: list[Literal["trackio", "wandb"]] = []
    """Trackers that get the metrics as well, under the same names. Each is an extra of this package."""
    project: Location = "solrl"
    """The tracker's project."""
    entity: str = ""
    """User or team at ``wandb``; empty: the login's."""
    space: str = ""
    """Hugging Face Space, ``owner/name``, in which ``trackio`` shows the run; if missing, it is made, private. Empty:
    ``trackio show`` on this machine.
    """


class Config(Section):
    run: RunConfig = RunConfig()
    model: Model
    prompts: Prompts
    rewards: Annotated[list[RewardConfig], Field(min_length=1)]
    rollout: RolloutConfig = RolloutConfig()
    fidelity: Fidelity = Fidelity()
    objective: ObjectiveConfig = DiffusionNftConfig()
    learner: LearnerConfig = LearnerConfig()
    fleet: FleetConfig = FleetConfig()
    publish: Publish = Publish()
    evaluation: EvaluationConfig = EvaluationConfig()
    compile: Compile = Compile()
    checkpoints: Checkpoints = Checkpoints()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def evaluated_model(self) -> Model:
        """The model with the guidance of evaluations."""
        own = {"guidance": self.evaluation.guidance, "cfg": self.evaluation.cfg}
        return self.model.model_copy(update={name: value for name, value in own.items() if value is not None})

"""The typed schema of a run: every section and key with its type, bounds and default. YAML presets are merged and then
validated against it; unknown keys are rejected (see `config.loading`).

A field's docstring is its entry in the configuration reference. It states the unit and the source of the default.
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
    """Name of the run. The run folder is ``<root>/<name>``."""
    root: Location = "runs"
    """Parent folder of the run folders."""
    seed: Natural = 42
    """Random seed of the run; every random draw depends on it."""
    iterations: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    """Training iterations. Each ends with an update of `learner.updates` × `learner.epochs` optimiser steps."""
    deterministic: bool = False
    """Use deterministic kernels on GPUs, so that every run gives the same bits; this costs speed. CPUs are always
    deterministic. Part of the score class.
    """
    on_collapse: Literal["warn", "stop", "rollback"] = "warn"
    """Reaction if an evaluation during training (`evaluation.every`) finds that the held-out reward has dropped by more
    than its standard error explains. ``warn``: log a warning. ``stop``: end the run. ``rollback``: continue from the
    best evaluated checkpoint with half the learning rate. Decided after the next update.
    """
    init: str = ""
    """Source of the initial policy: a run folder, one of its checkpoints, or a LoRA file. Empty: the base model."""
    init_digest: str = ""
    """LoRA digest of the factors in `init`. The run records it at its start; if you set it, the factors must match."""


class Lora(Section):
    rank: Positive = 32
    """LoRA rank: a layer [out, in] gets the factors A [rank, in] and B [out, rank]."""
    alpha: AboveZero = 64.0
    """LoRA scaling is alpha / rank."""
    targets: list[str]
    """Module-name suffixes that receive LoRA factors, as in PEFT's `target_modules`."""

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


class QuantizationScope(Section):
    skip: list[str] = []
    """Linear layers whose module path contains one of these strings stay unquantised. A leading ``^`` anchors the
    string to the start of the path: ``^proj_out``.
    """
    min_features: Natural = 0
    """Linear layers with max(in_features, out_features) <= this value stay unquantised."""


class SigmaSchedule(Section):
    kind: Literal["linear", "shift", "flow_shift", "flux", "flux2"]
    """``linear``: 1 → 0 in equal steps. ``shift``: SD3's double-shifted grid. ``flow_shift``: a single shift, as in the
    published schedulers of video models. ``flux``: exponential shift by mu. ``flux2``: exponential shift by FLUX.2's
    mu, which also depends on the number of steps.
    """
    shift: AboveZero = 3.0
    """Shift constant of ``shift`` and ``flow_shift``."""
    base_shift: float = 0.5
    """``flux``: mu at `base_tokens` image tokens."""
    max_shift: float = 1.15
    """``flux``: mu at `max_tokens` image tokens."""
    base_tokens: Positive = 256
    """``flux``: image tokens at which mu is `base_shift`."""
    max_tokens: Positive = 4096
    """``flux``: image tokens at which mu is `max_shift`. Between `base_tokens` and `max_tokens`, mu is linear."""
    terminal: Annotated[float, Field(gt=0, lt=1)] | None = None
    """``flux``: the schedule is stretched so that its last step starts at this noise level; null: not stretched."""


class Decoding(Section):
    """How the autoencoder decodes latents. These settings decide the bits of the images, so they never depend on free
    memory.
    """

    micro_batch: Natural = 0
    """Images decoded at once; 0: all images of the sampling micro-batch."""
    tiling: bool = False
    """Decode in overlapping tiles with blended seams, which needs less memory at high resolutions."""


class Model(Section):
    family: str
    """Model family, a name in `solrl_ray.models.FAMILIES`."""
    path: Location
    """Folder or Hugging Face id of a diffusers pipeline; ``builtin:testbed/pipeline`` ships with the package."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of all unquantised weights and activations: the "full precision" tier."""
    resolution: Resolution
    """Image size in pixels: the side of a square, ``[height, width]``, or a list of such pairs. With a list, each
    prompt uses the pair that its prompt file names, otherwise a seeded random one.
    """
    frames: Annotated[int, Field(ge=2)] | None = None
    """Frames per video, for video families; null: images. Wan needs 1 + a multiple of 4."""
    fps: Positive = 16
    """Playback rate of videos, frames per second: 16 for Wan 2.1, 24 for Wan 2.2 TI2V."""
    max_sequence_length: Positive
    """Maximum number of tokens of the long text encoder (T5, Gemma, Qwen)."""
    references: Natural = 0
    """Reference images per prompt, for image-editing models. They are resized to the size of the samples."""
    guidance: AtLeastZero = 1.0
    """Input of the guidance embedding, for models that have one (FLUX.1-dev); 1 for other models."""
    cfg: Cfg = Cfg()
    """Classifier-free guidance of all samples. `docs/reference/objectives.md` states which velocity each objective
    trains under guidance.
    """
    schedule: SigmaSchedule
    lora: Lora
    quantization: QuantizationScope = QuantizationScope()
    preview_decoder: str = ""
    """Folder or Hugging Face id of a small autoencoder (TAESD) with which explorers decode previews; empty: the model's
    VAE.
    """
    decoding: Decoding = Decoding()

    def describe_guidance(self) -> str:
        """Embedded and classifier-free guidance in words: ``embedded 3.5, scale 4.5 against "blurry"``. A guidance of 1
        is left out; empty if both are 1.
        """
        embedded = f"embedded {self.guidance:g}" if self.guidance != 1 else ""
        return ", ".join(filter(None, (embedded, self.cfg.describe())))

    @property
    def shapes(self) -> Shapes:
        """Shapes of the samples. All samples of a prompt have the same shape."""
        return as_shapes(self.resolution).with_frames(self.frames or 0)

    @property
    def unguided(self) -> Model:
        """The model without classifier-free guidance: the velocity for the prompt only."""
        return self.model_copy(update={"cfg": Cfg()})


class Prompts(Section):
    train: Location
    """File of training prompts: text (one prompt per line) or JSONL (key ``text``; with `model.references` also
    ``reference``, an image path or a list of them). ``builtin:`` paths are inside the package.
    """
    heldout: Location
    """File of evaluation prompts, in the same formats. It must not share a prompt with `train`."""


class ExploreConfig(Section):
    steps: Positive = 6
    """Solver steps of a preview."""
    micro_batch: Positive = 24
    """Previews per forward; must divide `rollout.pool`. If previews are pruned and this key is not set, it is 12."""
    precision: Precision = "auto"
    """Precision of the previews. ``auto``: on GPUs the fastest format with kernels for the GPU model (nvfp4, else fp8,
    else unquantised), on CPUs nvfp4-emulated. The run prints the chosen format at its start.
    """


class RegenerateConfig(Section):
    steps: Positive = 10
    """Solver steps of a regenerated sample."""
    micro_batch: Positive = 24
    """Samples per regeneration forward. The last micro-batch of a prompt is padded."""


class RolloutConfig(Section):
    strategy: Strategy = "two_stage"
    """``two_stage``: low-precision previews rank the seeds, and the chosen seeds are regenerated in full precision. The
    other strategies have one stage, with `regenerate.steps` steps: ``direct`` trains on the whole pool, ``scaled`` on
    the best and worst samples of the pool, ``quantized`` on the best and worst samples at `explore.precision`.
    """
    accept_quantized_training: bool = False
    """Must be true for ``quantized``, a baseline that trains on low-precision samples and is known to be bad."""
    prompts: Positive = 48
    """Prompts per iteration."""
    pool: Positive = 96
    """N: candidate seeds per prompt."""
    keep: Positive = 24
    """K: seeds per prompt that are regenerated and trained on. Even: half are the best, half the worst."""
    selection: SelectionKind = "best_worst"
    """Which K seeds of a pool ``two_stage`` regenerates. ``best`` and ``random`` (a seeded draw) are for comparison:
    they lose the contrast between good and bad samples that the method learns from.
    """
    max_staleness: Literal[0, 1] = 0
    """Policy revisions by which previews may lag. With 1, explorers preview the next iteration with the previous
    revision while the current iteration is regenerated and trained on. Training samples are never stale.
    """
    solver: Literal["euler", "dpm2"] = "dpm2"
    """ODE solver of the sampler ``ode`` and of every evaluation; ``dpm2`` is DPM-Solver++(2M)."""
    sampler: SamplerConfig = Ode()
    explore: ExploreConfig = ExploreConfig()
    preview: PreviewConfig = PreviewConfig()
    regenerate: RegenerateConfig = RegenerateConfig()


class Fidelity(Section):
    """Rank fidelity: how well previews rank the seeds, and the reaction to a low value. Measuring it changes neither
    selection nor learning.
    """

    measure: Literal["spearman", "kendall"] = "spearman"
    """Rank correlation of preview and sample rewards over a prompt's regenerated seeds. Its mean over the prompts of an
    iteration is compared with `floor`.
    """
    floor: Annotated[float, Field(gt=-1, lt=1)] | None = None
    """Lowest acceptable value of `measure`, between -1 and 1; null: no limit."""
    patience: Positive = 3
    """Consecutive iterations below `floor` that trigger `on_low`."""
    on_low: Literal["warn", "stop"] = "warn"
    """``warn``: print which keys to change, once each time the measure drops below `floor`. ``stop``: end the run with
    the same message, after writing its checkpoint.
    """


class OptimizerConfig(Section):
    """AdamW, as in PyTorch."""

    lr: AboveZero = 3e-4
    """Peak learning rate; see `learner.schedule`."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's beta1 and beta2: decay rates of the first and second moment."""
    eps: AboveZero = 1e-8
    """AdamW's epsilon, added to the denominator of a step."""
    weight_decay: AtLeastZero = 1e-4
    """Decoupled weight decay of the LoRA factors."""


class Schedule(Section):
    """Learning-rate schedule: warm-up to `optimizer.lr`, then decay. Constant by default."""

    warmup: Natural = 0
    """Warm-up length in optimiser steps: step s uses s / warmup of `optimizer.lr`."""
    decay: Literal["none", "linear", "cosine", "inverse_sqrt"] = "none"
    """Decay after the warm-up. ``none``: constant. ``linear``: a straight line. ``cosine``: half a cosine.
    ``inverse_sqrt``: 1 / sqrt(1 + s / steps) after s steps, which needs no planned end.
    """
    steps: Natural = 0
    """Length of the decay in optimiser steps. For ``inverse_sqrt``: after this many steps the rate is 0.71 of
    `optimizer.lr`, and after 8 times as many a third of it.
    """
    floor: ShareOrZero = 0.0
    """Final learning rate after the decay, as a share of `optimizer.lr`."""


class LearnerConfig(Section):
    world_size: Workers = 1
    """Number of data-parallel learner ranks. They shard the optimiser state (ZeRO-1). Changes the LoRA digest."""
    micro_batch: Positive = 12
    """Samples per forward and backward pass. If `activation_memory` is null, this is the maximum: a smaller micro-batch
    may be chosen to fit the GPU.
    """
    updates: Positive = 1
    """Optimiser steps per epoch. Each step trains on an equal share of the iteration's prompts, so this must divide
    `rollout.prompts`.
    """
    epochs: Positive = 1
    """Passes over an iteration's samples, with `updates` optimiser steps each. Objectives that noise the samples draw
    new noise and noise levels in each epoch. More than 1 needs an objective with a `clip_range`.
    """
    gradient_clip: AtLeastZero = 1.0
    """Maximum global gradient norm; 0: no clipping."""
    activation_memory: ShareOrZero | None = None
    """Share of the activations kept for the backward pass. The rest is recomputed, which takes less memory and more
    time. Without compilation only 0 and 1 are possible. null: a compiled learner takes the first of 1, 0.5 and 0 that
    fits in GPU memory, with a smaller `micro_batch` if that still keeps the GPU busy; any other learner takes 0.
    Decided when the run begins. Changes the LoRA digest, as do `compile.learner` and `micro_batch`.
    """
    ema_cap: ShareOrZero = 0.9
    """Maximum EMA decay. After update s the decay is min((1 + s) / (10 + s), `ema_cap`)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: Schedule = Schedule()

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps per iteration."""
        return self.updates * self.epochs


class Publish(Section):
    """How a new policy revision reaches the explorers. Regenerators always merge the LoRA factors themselves."""

    mode: Literal["packed", "lora"] = "packed"
    """Format of a revision for explorers in processes without a learner rank. ``packed``: weights merged and quantised
    by the learner ranks. ``lora``: LoRA factors, which each explorer merges and quantises, and whose result must have
    the same bytes. ``lora`` sends less data, and explorers need more memory for the base weights.
    """


class EvaluationConfig(Section):
    every: Natural = 0
    """Iterations between evaluations on held-out prompts; 0: only before the first and after the last iteration. An
    evaluation runs during the next update, or after it if `fleet.placement` is ``colocated``.
    """
    prompts: Positive = 64
    """Held-out prompts used, at most: the first ones of the file, or all of a shorter one."""
    samples: Positive = 4
    """Samples per prompt, with the same seeds in every evaluation."""
    micro_batch: Natural = 0
    """Samples per forward. A forward has all samples of as many prompts as fit, but of at least one prompt. A larger
    value keeps a GPU busier if the model or `samples` is small. It changes the last bits of a score.
    """
    steps: Positive = 10
    """Solver steps of an evaluated sample."""
    guidance: AtLeastZero | None = None
    """Embedded guidance of evaluated samples; null: as `model.guidance`."""
    cfg: Cfg | None = None
    """Classifier-free guidance of evaluated samples, even if the run trains without it; null: as `model.cfg`."""
    pictures: Natural = 8
    """Prompts of the before/after image grid, at most."""
    reference: str = ""
    """Optional function, ``module:function`` or ``file.py:function``, that draws a real image for a prompt. It also
    gets the prompt's reference images if it has a parameter named `reference` or `references`. The reward of the real
    images is reported as `reward_real`.
    """
    _own: OwnCode | None = PrivateAttr(default=None)

    @property
    def prompts_at_once(self) -> int:
        """Prompts whose samples share a forward."""
        return max(1, min(self.prompts, self.micro_batch // self.samples))


class Compile(Section):
    """Compilation with `torch.compile`. Part of the score class of explorers and regenerators."""

    enabled: bool | None = None
    """Compile the transformer's blocks one by one in explorers and regenerators; null: on GPUs yes, on CPUs no."""
    learner: bool | None = None
    """Compile the blocks' forward and backward in learners; null: yes if `fleet.learners` have GPUs. Changes the LoRA
    digest.
    """
    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """Mode of `torch.compile`. ``max-autotune-no-cudagraphs`` chooses kernels by timing them, so they may differ from
    run to run.
    """
    decoder: bool = False
    """Also compile the decoder where the transformer is compiled, or would be but for the tier ``nvfp4-emulated``.
    Decoding is faster, the start takes longer.
    """
    cache: str = ""
    """Cache folder of compiled code, reused by later runs; empty: ``solrl_ray/compiled`` in the user's cache folder."""


class Checkpoints(Section):
    keep: Positive = 2
    """Number of newest checkpoints to keep; older ones are removed."""
    every: Natural = 0
    """Keep every n-th checkpoint permanently; 0: none."""
    upload: str = ""
    """Path or fsspec URL (``s3://bucket/folder``) to which checkpoints are copied in the background, in a subfolder
    with the run's name. Put credentials in the provider's environment variables or files, not here.
    """
    min_free_gb: AtLeastZero = 0.2
    """Minimum free disk space for the run folder at the start, GB."""


class TrackingConfig(Section):
    """Experiment tracking. TensorBoard events are always written. If a tracker fails, the run logs it and continues."""

    trackers: list[Literal["trackio", "wandb"]] = []
    """Additional trackers for the metrics, with the same metric names. Each one is an extra of this package."""
    project: Location = "solrl"
    """Project name in the trackers."""
    entity: str = ""
    """User or team at ``wandb``; empty: the account's default."""
    space: str = ""
    """Hugging Face Space, ``owner/name``, in which ``trackio`` shows the run. A missing Space is created, private.
    Empty: ``trackio show`` on this machine.
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

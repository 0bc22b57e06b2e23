"""The arithmetic of a run: counts and sizes, computed from its configuration, printed before it starts (design law 9).

    prompts × N candidates ──► units of the pools ──► prompts × K samples ──► micro-batches ──► optimiser steps

"Forward" means one call of the transformer on a whole micro-batch, with guidance on twice its samples. Both solvers
need one call per step.
"""

from __future__ import annotations

import math
import re
import textwrap
from dataclasses import dataclass, fields
from functools import partial

from jinja2 import Environment, PackageLoader, StrictUndefined

from solrl_ray.config import compiled_learner, selection_rules
from solrl_ray.config.fleet import WorkerResources
from solrl_ray.config.pools import (
    REGENERATORS,
    apart,
    encoded_ahead,
    encoders,
    encoding_batch,
    needs_packed,
    on_cards,
    reserved,
)
from solrl_ray.config.problems import counted, listed
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import describe_tier, is_one_stage, pool_sampling
from solrl_ray.models.shapes import DTYPE_BYTES
from solrl_ray.planning.update import (
    FLOAT32_BYTES,
    backwards,
    forwards_without_gradient,
    latents_a_sample,
    micro_batches,
    references,
    trained_timesteps,
    training_bytes,
    trains_guided_velocity,
)

NAMES = len("regenerate")
"""Minimum width of the column of names, in characters, so that tables printed one after another are aligned."""
WIDTH = 100
"""Width of a printed plan, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts from the model's own files; see `solrl_ray.planning.model_facts`."""

    latent_shape: tuple[int, ...]
    """Shape of the largest sample's latent."""
    parameters: int
    """Parameters of the transformer, LoRA not counted."""
    lora_modules: int
    """Number of linear layers with LoRA factors."""
    lora_parameters: int
    """Parameters of one adapter."""
    packed_bytes: int
    """Bytes of codes and scales of the linear layers that have LoRA and are quantised; 0 if there are none."""
    packed_tier: str = ""
    """Precision tier of the packed layers."""
    recomputed_bytes: int = 0
    """Estimated bytes per sample that a learner's forward keeps for the backward pass if everything is recomputed."""
    activation_bytes: int = 0
    """Estimated bytes per sample that a learner's forward keeps for the backward pass if nothing is recomputed."""
    explorer_bytes: int = 0
    """Bytes of an explorer's transformer: quantised layers in their format, everything else in `model.dtype`."""
    quantized_parameters: int = 0
    """Number of weights that explorers quantise."""
    touched_parameters: int = 0
    """Number of weights in linear layers with LoRA factors."""
    plain_touched_parameters: int = 0
    """Number of weights in linear layers with LoRA factors that explorers do not quantise."""
    buffers: int = 0
    """Number of values in the transformer's buffers."""
    streams: int = 0
    """Number of blocks; blocks with separate weights for image and text count twice."""
    stream_flops: int = 0
    """Floating-point operations of one stream's linear layers per forward and sample."""
    forward_bytes: int = 0
    """Estimated peak memory of a forward without gradient, bytes per sample."""
    decoding_bytes: int = 0
    """Estimated peak memory of decoding one image, bytes."""
    memory_is_known: bool = True
    """Whether memory can be estimated for this model. If not, the estimates above are 0."""
    decoder_parameters: int = 0
    """Parameters of the autoencoder, encoder included."""
    text_parameters: int = 0
    """Parameters of the text encoders."""
    embedding_bytes: int = 0
    """Bytes of an encoded prompt."""
    tokens: int = 0
    """Tokens per sample in the transformer's blocks: a sample of the smallest shape, its references and its text."""

    @property
    def quantized_share(self) -> float:
        """Share of the transformer's weights that explorers quantise."""
        return self.quantized_parameters / self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Counts per iteration, unless a docstring states otherwise. Bytes are sizes of tensors, without file headers."""

    config: Config
    facts: ModelFacts
    candidates: int
    explore_units: int
    """Work units of the pools. The candidates of a unit are previews, or with one stage the samples themselves."""
    explore_forwards: int
    dropped: int
    """Candidates whose previews are pruned."""
    padded_previews: int
    """Padding previews in the last micro-batches of pruned units; they are discarded."""
    samples: int
    regenerate_units: int
    regenerate_forwards: int
    padded_images: int
    """Padding images in the last regeneration micro-batch of each prompt; they are discarded."""
    trained_timesteps: int
    micro_batches: int
    """Learner micro-batches per rank in all optimiser steps. Each one is trained at every trained timestep."""
    padded_samples: int
    """Repeated samples with weight 0 in the ranks' last micro-batches."""
    forwards_without_gradient: int
    """Forwards without gradient per rank: for v_reference (with a KL term), v_anchor and v_old. If the sampling policy
    is a copy of the trained policy, v_old equals v_theta until the first optimiser step of the iteration and needs
    none. A guided velocity, including v_theta, needs one more for the negative prompt.
    """
    backwards: int
    """Forward-and-backward passes per rank."""
    evaluations: tuple[int, ...]
    """Number of updates before each evaluation of the run."""
    evaluation_images: int
    """Images per evaluation."""
    latents_bytes: int
    """Bytes of the samples, with the trajectories of objectives that need them."""
    pool_bytes: int
    """Bytes of latents and trajectories of a prompt's pool, which one-stage strategies keep until selection."""
    lora_bytes: int
    """Bytes of one adapter's factors in float32."""
    packed_bytes: int
    weights_bytes: int
    """Bytes of the transformer, buffers included, as every worker process holds it."""
    training_bytes: int
    """Bytes of a learner rank's LoRA policies, gradient and shard of AdamW's state (factors, two moments), in float32.
    """
    activation_bytes: int
    """Estimated bytes that a micro-batch's forward keeps for the backward pass on a learner rank."""
    train_prompts: int | None = None
    heldout_prompts: int | None = None

    @property
    def revision_bytes(self) -> int:
        return self.lora_bytes + self.packed_bytes

    @property
    def gpus(self) -> float:
        """GPUs that the actors reserve with Ray."""
        return reserved(self.config, "num_gpus")

    def rows(self) -> list[tuple[str, str]]:
        """The rows of `table`: name of the stage, description of its work."""
        config, cpus = self.config, reserved(self.config, "num_cpus")
        texts = Environment(
            loader=PackageLoader("solrl_ray.planning"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        texts.filters |= {"listed": listed, "of": counted, "size": describe_size, "thousands": "{:,}".format}
        texts.filters["tier"] = partial(describe_tier, config)
        text = texts.get_template("arithmetic.txt").render(
            {entry.name: getattr(self, entry.name) for entry in fields(self)},
            one_stage=is_one_stage(config),
            pool=pool_sampling(config),
            chosen=selection_rules.describe(config.rollout.selection, config.rollout.keep, config.rollout.pool),
            reserved=[counted(count, name) for name, count in (("CPU", cpus), ("GPU", self.gpus)) if count],
            references=references(config),
            model_guidance=config.model.cfg.describe(),
            evaluation_guidance=config.evaluated_model.cfg.describe(),
            guided_learner=trains_guided_velocity(config),
            compiled=compiled_learner.is_compiled(config),
            activation_memory=compiled_learner.activation_memory(config),
            revision_bytes=self.revision_bytes,
            workers=_processes(config),
            processes=sum(count for _, count, _ in _processes(config)),
            ahead=encoded_ahead(config.fleet),
            encoding_batch=encoding_batch(config.fleet),
            encoders=encoders(config),
            text_encoder_bytes=self.facts.text_parameters * DTYPE_BYTES[config.model.dtype],
            inside=[
                counted(count, name)
                for name, pool in (("explorer", "explorers"), ("regenerator", REGENERATORS))
                if (count := on_cards(config, pool))
            ],
            gpus=self.gpus,
        )
        _, *sections = re.split("^## (.+)$", text, flags=re.MULTILINE)
        return [(name, " ".join(words.split())) for name, words in zip(sections[::2], sections[1::2], strict=True)]

    def table(self, *, without: str = "") -> str:
        """The printed arithmetic: one paragraph per stage. `without`: name of a row to leave out."""
        return paragraphs([row for row in self.rows() if row[0] != without])


def paragraphs(rows: list[tuple[str, str]]) -> str:
    """Rows as text: a column of names, and next to each name its text, wrapped at `WIDTH` characters."""
    column = max(NAMES, *(len(name) for name, _ in rows)) + 2
    return "\n".join(
        textwrap.fill(
            text,
            width=WIDTH,
            initial_indent=name.ljust(column),
            subsequent_indent=" " * column,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, text in rows
    )


def _processes(config: Config) -> tuple[tuple[str, int, WorkerResources], ...]:
    """The worker processes: name, number, resources of each. Roles in learners' processes are not listed separately."""
    names = {"explorers": "explorer", REGENERATORS: "regenerator"}
    others = ((names[name], pool.count, pool) for name, pool in apart(config).items())
    return (*others, ("learner", config.learner.world_size, config.fleet.learners))


def evaluation_points(config: Config) -> tuple[int, ...]:
    """Numbers of updates after which the policy is evaluated, rising: 0, every `evaluation.every`, the last."""
    last, every = config.run.iterations, config.evaluation.every
    between = range(every, last, every) if every else ()
    return (0, *between, last)


def describe(
    config: Config, facts: ModelFacts, *, train_prompts: int | None = None, heldout_prompts: int | None = None
) -> Arithmetic:
    """Compute the counts of a run. Pure.

    Without numbers of prompts, the row on prompts is left out. The configuration must have passed `checks.check`.
    """
    rollout, learner = config.rollout, config.learner
    pool, one_stage = pool_sampling(config), is_one_stage(config)
    regenerate_units = 0 if one_stage else rollout.prompts * math.ceil(rollout.keep / rollout.regenerate.micro_batch)
    samples = rollout.prompts * rollout.keep
    slots = learner.world_size * learner.micro_batch
    explore_units = rollout.prompts * pool.units
    return Arithmetic(
        config=config,
        facts=facts,
        candidates=rollout.prompts * rollout.pool,
        explore_units=explore_units,
        explore_forwards=explore_units * pool.forwards,
        dropped=rollout.prompts * (rollout.pool - pool.kept),
        padded_previews=explore_units * pool.padding,
        samples=samples,
        regenerate_units=regenerate_units,
        regenerate_forwards=regenerate_units * rollout.regenerate.steps,
        padded_images=max(0, regenerate_units * rollout.regenerate.micro_batch - samples),
        trained_timesteps=trained_timesteps(config),
        micro_batches=micro_batches(config),
        padded_samples=micro_batches(config) * slots - learner.epochs * samples,
        forwards_without_gradient=forwards_without_gradient(config),
        backwards=backwards(config),
        evaluations=evaluation_points(config),
        evaluation_images=min(config.evaluation.prompts, heldout_prompts or config.evaluation.prompts)
        * config.evaluation.samples,
        **_sizes(config, facts),
        train_prompts=train_prompts,
        heldout_prompts=heldout_prompts,
    )


def _sizes(config: Config, facts: ModelFacts) -> dict[str, int]:
    """The fields of `Arithmetic` that are bytes."""
    sample_bytes = latents_a_sample(config) * math.prod(facts.latent_shape) * FLOAT32_BYTES
    packed = config.publish.mode == "packed" and needs_packed(config, config.fleet.explorers.count)
    # Activations: between only the blocks' inputs and everything that the backward pass needs.
    share, most, least = compiled_learner.activation_memory(config), facts.activation_bytes, facts.recomputed_bytes
    return {
        "latents_bytes": config.rollout.prompts * config.rollout.keep * sample_bytes,
        "pool_bytes": config.rollout.pool * sample_bytes if is_one_stage(config) else 0,
        "lora_bytes": facts.lora_parameters * FLOAT32_BYTES,
        "packed_bytes": facts.packed_bytes * packed,
        "weights_bytes": (facts.parameters + facts.buffers) * DTYPE_BYTES[config.model.dtype],
        "training_bytes": training_bytes(config, facts.lora_parameters),
        "activation_bytes": round(config.learner.micro_batch * (least + share * (most - least))),
    }


def describe_size(count: float) -> str:
    """Bytes in words, in decimal units as for disks and networks."""
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"

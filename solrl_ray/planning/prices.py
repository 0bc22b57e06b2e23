"""Seconds of each stage of a run on a given GPU model, from price lists.

A price list is a YAML file; the lists in ``price_lists/`` ship with the package. Each figure states whether it was
measured, and its source. Models that are not in the list have no prices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from solrl_ray.config import problems, reward_kinds
from solrl_ray.config.compiled_learner import activation_memory, is_compiled
from solrl_ray.config.loading import read_file
from solrl_ray.config.pools import is_colocated, needs_packed, on_cards
from solrl_ray.config.schema import Config
from solrl_ray.config.section import AboveZero, Positive, Section
from solrl_ray.config.strategies import full_tier, is_one_stage, pool_sampling
from solrl_ray.errors import UserError
from solrl_ray.models import FAMILIES
from solrl_ray.planning import fitting
from solrl_ray.planning.arithmetic import Arithmetic, ModelFacts
from solrl_ray.planning.iteration import Orchestration, Stages
from solrl_ray.planning.price_list import Figure, ModelCosts, PriceList, scaled_from

SHIPPED = Path(__file__).with_name("price_lists")
SAME = 1.05
"""Factor up to which the parameters and the pixels of two models may differ to count as the same."""
SAME_SHARE = 0.02
"""Difference up to which two shares of quantised weights count as the same."""
ON_ITS_CARD, TOUCHED = 0.65, 1.79e9
"""Seconds in which a learner's process builds and loads a revision, besides rollout, update and controller, and the
number of weights with LoRA: of FLUX.1-dev and SD3.5-Large, measured on an H100 (``rehearsal_*.json``).
"""

LAUNCH_MS = 1.2
"""Milliseconds in which a CPU launches the kernels of a block's forward in a compiled learner, per stream of the block.
A backward pass has twice as many kernels, plus those of recomputed forwards. A micro-batch with less computation waits
for the launches. Measured for one pass with gradient and two without: 6.1 ms per stream with two samples of SANA on an
H200 (all activations kept), 6.5 ms with one sample of Qwen-Image-Edit on an H100 (half of them kept).
"""

P = TypeVar("P", bound=Section)


class Unpriced(UserError):
    """The price list does not have the model or the tier."""


class Cluster(Section):
    """The machines of a forecast. The number of workers is in the configuration."""

    gpu: str
    """Name of a shipped price list, such as ``h200``, or the path of a price list."""
    gpus_per_node: Positive = 8
    gigabytes_per_second: AboveZero = 2.0
    """Bandwidth of a node through the object store, GB/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Seconds of a configuration's stages, and the figures used for them."""

    stages: Stages
    figures: dict[str, Figure]
    """Purpose → the figure, scaled if needed."""
    from_data_sheet: bool
    """Whether all figures are scaled from another GPU, so that nothing was measured on this one."""


def shipped_lists() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.yaml") if path.stem != "controller")


def price_list(name: str) -> PriceList:
    """The price list of a GPU, complete: a shipped one (``h100-80``, ``H100 80``, ``NVIDIA RTX 4090``), or a file.

    ``48GB`` is any GPU with FP8 and so much memory: it answers whether a run fits, and has no prices.

    Raises UserError if there is none.
    """
    if size := re.fullmatch(r"(\d+(?:\.\d+)?) ?GB", name.strip(), re.IGNORECASE):
        return PriceList(gpu=f"GPU of {size[1]} GB", fastest="fp8", memory_gb=float(size[1]))
    shipped = shipped_lists()
    known = {_letters(each): each for each in shipped}.get(_letters(name))
    path = SHIPPED / f"{known}.yaml" if known else Path(name)
    if not path.is_file():
        raise UserError(_no_list(name, shipped))
    prices = read_part(path, PriceList)
    if not prices.like:
        return prices
    if prices.like not in shipped or prices.speed is None:
        raise UserError(
            f"{path}: like is {prices.like!r}; it must be one of {', '.join(shipped)}, and the key speed must contain "
            "the speed of this GPU."
        )
    return scaled_from(prices, price_list(prices.like))


def _letters(gpu: str) -> str:
    """A GPU's name without what people write in different ways."""
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", gpu.lower()).removesuffix("gb")


def _no_list(name: str, shipped: Sequence[str]) -> str:
    given, names = f"gpu is {name!r} (--gpu or the cluster's file)", ", ".join(shipped)
    if Path(name).suffix or "/" in name:
        return f"{given}, but that file does not exist; name an existing file, or one of {names}."
    near = problems.nearest(name.lower(), shipped)
    meant = f"; did you mean {near}?" if near else "."
    return f"{given}; it must be one of {names}, a size such as 48GB, or a price list in a file{meant}"


def cluster_of(file: Path | None, gpu: str | None) -> Cluster:
    """The cluster in `file`, with the GPU model `gpu` if given. Raises UserError for a bad file."""
    cluster = read_part(file, Cluster) if file else Cluster(gpu=gpu or "")
    return cluster.model_copy(update={"gpu": gpu}) if gpu else cluster


def orchestration() -> Orchestration:
    """Measured overhead of the controller."""
    return read_part(SHIPPED / "controller.yaml", Orchestration)


def read_part(path: Path, kind: type[P]) -> P:
    """Read a `kind` from a YAML file. Raises UserError with file and key in one sentence."""
    try:
        return kind.model_validate(read_file(path))
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        known = f"a {kind.__name__} has the keys {', '.join(kind.model_fields)}"
        raise UserError(f"{path}: {problems.dotted(detail['loc'])}: {detail['msg']}; {known}.") from None


def priced(arithmetic: Arithmetic, prices: PriceList, cluster: Cluster) -> Priced:
    """Seconds of each stage. Raises `Unpriced` if the list does not have the model or tier.

    The learner's time is the sum of the transfer of samples to its node, its passes, and a ring all-reduce of its
    gradient between nodes (2 (n - 1) / n times the gradient's bytes).
    """
    config = arithmetic.config
    costs = _listed(config, arithmetic.facts, prices)
    rollout, learner = config.rollout, config.learner
    pool = pool_sampling(config)
    tier = prices.fastest if pool.tier == "auto" else pool.tier
    share, velocities = arithmetic.facts.quantized_share, config.model.cfg.velocities
    preview = _step(costs, tier, "rollout.explore.precision", prices, share)
    full = _step(costs, full_tier(config.model), "model.dtype", prices)
    if velocities > 1:
        preview, full = (
            step.scaled(velocities, f"{step.source}; doubled for classifier-free guidance") for step in (preview, full)
        )
    forward, backward = _passes(config, costs)
    decoded = _decode_and_reward(config, costs)
    image = decoded.ms
    drawn = math.ceil(rollout.keep / rollout.regenerate.micro_batch) * rollout.regenerate.micro_batch
    launched = LAUNCH_MS * arithmetic.facts.streams
    forwards = arithmetic.forwards_without_gradient * max(learner.micro_batch * forward.ms, launched)
    started = 4 - activation_memory(config)  # in forwards: one, the recomputed share, and two of the backward pass
    passes = forwards + arithmetic.backwards * max(learner.micro_batch * backward.ms, started * launched)
    # Only the first optimiser step can start early: later steps depend on its result (docs/decisions/overlap.md).
    early = forwards / learner.optimizer_steps
    figures = {
        f"pool step ({tier})": preview,
        f"regeneration step ({full_tier(config.model)})": full,
        "decode and reward": decoded,
        "training pass": backward,
        "forward without gradient": forward,
        "writing a checkpoint": costs.checkpoint,
    }
    source = f"{ON_ITS_CARD:g} s measured with FLUX.1-dev on an H100, scaled by the weights with LoRA"
    ms = 1000 * ON_ITS_CARD * max(1, arithmetic.facts.touched_parameters) / TOUCHED
    merge = costs.merge or Figure(ms=ms, measured=False, source=source)
    packed = needs_packed(config, config.fleet.explorers.count)
    if packed:
        figures |= {"making a revision": costs.publication, "loading it on a worker": costs.load}
    if is_colocated(config.fleet):
        figures["revision in a learner's process"] = merge
    if is_one_stage(config):
        del figures[f"regeneration step ({full_tier(config.model)})"]
    share, figures["decode and reward"] = _previewed(config, decoded)
    stages = Stages(
        explore=pool.micro_batch * (pool.forwards * preview.ms + pool.decodings * share * image) / 1000,
        regenerate=(drawn * rollout.regenerate.steps * full.ms + rollout.keep * image) / 1000,
        update=passes / 1000 + _traffic(config, arithmetic, cluster),
        early=0.0 if is_colocated(config.fleet) else early / 1000,
        checkpoint=costs.checkpoint.ms / 1000,
        publication=costs.publication.ms / 1000 * packed,
        load=costs.load.ms / 1000 + _transfer(config, arithmetic, cluster),
        merge=merge.ms / 1000,
        onload=fitting.seconds(arithmetic, prices.device.host_link) if prices.device else 0.0,
    )
    return Priced(stages=stages, figures=figures, from_data_sheet=costs.from_data_sheet)


def _decode_and_reward(config: Config, costs: ModelCosts) -> Figure:
    """Cost of decoding and scoring an image. Price lists contain it with CLIPScore, which also stands for all other
    rewards except language models.
    """
    listed, others = costs.decode_and_reward, [reward.kind for reward in config.rewards if reward.kind != "clipscore"]
    if not others:
        return listed
    slow = {kind: reward_kinds.REGISTERED[kind].ms for kind in others if kind in reward_kinds.REGISTERED}
    slow = {kind: ms for kind, ms in slow.items() if ms}
    notes = [f"{kind} estimated at {ms:g} ms" for kind, ms in slow.items()]
    if counted := [kind for kind in others if kind not in slow]:
        notes.insert(0, f"{', '.join(counted)} counted as CLIPScore")
    ms = listed.ms + sum(slow.get(kind, 0) for kind in others)
    return Figure(ms=ms, measured=False, source=f"{'; '.join(notes)}; {listed.source}")


def _previewed(config: Config, decoded: Figure) -> tuple[float, Figure]:
    """Share of a video's frames that a preview decodes (1: all), and the price of decoding with a note on it.

    The small cost of the reward is scaled with the frames, too.
    """
    chosen, frames = config.rollout.preview.latent_frames, config.model.frames
    if not chosen or not frames or is_one_stage(config):
        return 1.0, decoded
    shown = FAMILIES[config.model.family].SIZES.frames(len(chosen))
    source = f"{decoded.source}; a preview decodes {shown} of {frames} frames and counts with that share of it"
    return shown / frames, decoded.model_copy(update={"measured": False, "source": source})


def _passes(config: Config, costs: ModelCosts) -> tuple[Figure, Figure]:
    """Cost of a learner's forward without gradient, and of its forward and backward."""
    kept = activation_memory(config)
    if is_compiled(config) and costs.compiled is not None:
        return costs.compiled.forward, costs.compiled.at(kept)
    if kept == 1 or is_compiled(config):
        return costs.forward, costs.backward
    recomputing = Figure(ms=costs.backward.ms + costs.forward.ms, measured=False, source="backward plus one forward")
    return costs.forward, costs.backward_checkpointed or recomputing


def _listed(config: Config, facts: ModelFacts, prices: PriceList) -> ModelCosts:
    """The price list's row of the model by family, parameters and pixels, averaged over the run's shapes."""
    model = config.model
    for row in prices.models:
        ratios = facts.parameters / row.parameters, model.shapes.volume / row.shape.volume
        if row.family == model.family and all(1 / SAME <= ratio <= SAME for ratio in ratios):
            return row
    rows = [row for row in prices.models if row.family == model.family] or prices.models
    names = ", ".join(f"{row.family} at {row.shape} ({row.parameters / 1e9:.2g} B parameters)" for row in rows)
    raise Unpriced(
        f"the price list of {prices.gpu} has no {model.family} at {model.shapes} with {facts.parameters / 1e9:.2g} B "
        f"parameters ({model.path}); it has {names or 'no models'}"
    )


def _step(costs: ModelCosts, tier: str, key: str, prices: PriceList, share: float = 0.0) -> Figure:
    """Cost of a solver step in `tier`, with the listed share of quantised weights that is nearest to `share`."""
    if tier not in costs.steps:
        raise Unpriced(
            f"{key} is {tier!r}, for which the price list of {prices.gpu} has no figure with family {costs.family}; it "
            f"has {', '.join(costs.steps)}"
        )
    step = costs.steps[tier]
    if step.weights is None:
        return step
    known = {figure.weights: figure for figure in (step, *costs.scopes.get(tier, ())) if figure.weights is not None}
    weights = min(known, key=lambda candidate: abs(candidate - share))
    nearest = known[weights]
    if abs(weights - share) <= SAME_SHARE:
        return nearest
    return nearest.scaled(1.0, f"{nearest.source}; with {weights:.0%} quantised weights, the run has {share:.0%}")


def _traffic(config: Config, arithmetic: Arithmetic, cluster: Cluster) -> float:
    """Seconds of the learner group's traffic between nodes, without overlap."""
    ranks = config.learner.world_size
    nodes = math.ceil(ranks / cluster.gpus_per_node)
    gradient = 2 * (nodes - 1) / nodes * arithmetic.lora_bytes * config.learner.optimizer_steps
    return (gradient + arithmetic.latents_bytes) / (cluster.gigabytes_per_second * 1e9)


def _transfer(config: Config, arithmetic: Arithmetic, cluster: Cluster) -> float:
    """Seconds to transfer a revision to a node; 0 if every explorer shares a GPU with a learner."""
    alone = config.fleet.explorers.count - on_cards(config, "explorers")
    return arithmetic.revision_bytes / (cluster.gigabytes_per_second * 1e9) if alone else 0.0

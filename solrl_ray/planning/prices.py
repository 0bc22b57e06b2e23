"""Seconds of each stage of a run on a given card, from price lists, which are data.

A price list is a YAML file; those of ``price_lists/`` are shipped. Each figure says whether and on what it was
measured. Models that are not listed have no prices.
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
"""Models whose parameters and image tokens differ by less than this factor count as the same."""
SAME_SHARE = 0.02
"""Shares of quantised weights that differ by at most this count as the same."""
ON_ITS_CARD, TOUCHED = 0.65, 1.79e9
"""Seconds beside rollout and update, without the controller's, in which a card that learns makes a revision its own,
and weights that LoRA touches: of FLUX.1-dev and of SD3.5-Large, on an H100 (``rehearsal_*.json``).
"""

LAUNCH_MS = 1.2
"""Milliseconds in which a CPU starts the kernels of a block's forward in a compiled learner, for each of its streams. A
backward pass has twice as many, and forwards that are computed again. A micro-batch that computes for less waits for
them. A pass with gradient and two without took 6.1 ms a stream with two samples of SANA on an H200, all activations
kept, and 6.5 with one of Qwen-Image-Edit on an H100, half of them kept.
"""

P = TypeVar("P", bound=Section)


class Unpriced(UserError):
    """The price list lacks the model or the tier."""


class Cluster(Section):
    """The machines, for a forecast; the configuration has the number of workers."""

    gpu: str
    """A shipped price list, such as ``h200``, or the path of another one."""
    gpus_per_node: Positive = 8
    gigabytes_per_second: AboveZero = 2.0
    """Bandwidth of a node through the object store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A configuration's stages, and the figures used."""

    stages: Stages
    figures: dict[str, Figure]
    """Purpose → the figure, scaled if needed."""
    from_data_sheet: bool
    """Whether nothing was measured on such a card."""


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
    found = read_part(path, PriceList)
    if not found.like:
        return found
    if found.like not in shipped or found.speed is None:
        raise UserError(
            f"{path}: like is {found.like!r}; it must be one of {', '.join(shipped)}, and the key speed must say how "
            "fast this card is."
        )
    return scaled_from(found, price_list(found.like))


def _letters(gpu: str) -> str:
    """A GPU's name without what people write in different ways."""
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", gpu.lower()).removesuffix("gb")


def _no_list(name: str, shipped: Sequence[str]) -> str:
    said, names = f"gpu is {name!r} (--gpu or the cluster's file)", ", ".join(shipped)
    if Path(name).suffix or "/" in name:
        return f"{said}, but there is no such file; name one that is there, or {names}."
    near = problems.nearest(name.lower(), shipped)
    meant = f"; did you mean {near}?" if near else "."
    return f"{said}; it must be one of {names}, a size such as 48GB, or a price list in a file{meant}"


def cluster_of(file: Path | None, gpu: str | None) -> Cluster:
    """The cluster of `file`, with the card `gpu` if that is given. Raises UserError for a bad file."""
    described = read_part(file, Cluster) if file else Cluster(gpu=gpu or "")
    return described.model_copy(update={"gpu": gpu}) if gpu else described


def orchestration() -> Orchestration:
    """Costs of the controller's messages, as measured once."""
    return read_part(SHIPPED / "controller.yaml", Orchestration)


def read_part(path: Path, kind: type[P]) -> P:
    """A `kind` from a YAML file. Raises UserError: one sentence with file and key."""
    try:
        return kind.model_validate(read_file(path))
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        known = f"a {kind.__name__} has the keys {', '.join(kind.model_fields)}"
        raise UserError(f"{path}: {problems.dotted(detail['loc'])}: {detail['msg']}; {known}.") from None


def priced(arithmetic: Arithmetic, prices: PriceList, cluster: Cluster) -> Priced:
    """Seconds of each stage. Raises `Unpriced` if the list lacks the model or tier.

    The learner's time is the sum of its passes, then, between nodes, a ring all-reduce of its gradient (2 (n - 1) / n
    times its bytes), and before them the transfer of samples to its node.
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
            step.scaled(velocities, f"{step.source}; twice, with classifier-free guidance") for step in (preview, full)
        )
    forward, backward = _passes(config, costs)
    decoded = _decode_and_reward(config, costs)
    image = decoded.ms
    drawn = math.ceil(rollout.keep / rollout.regenerate.micro_batch) * rollout.regenerate.micro_batch
    launched = LAUNCH_MS * arithmetic.facts.streams
    forwards = arithmetic.forwards_without_gradient * max(learner.micro_batch * forward.ms, launched)
    started = 4 - activation_memory(config)  # forwards, as many kernels as two in the backward pass
    passes = forwards + arithmetic.backwards * max(learner.micro_batch * backward.ms, started * launched)
    # Only the first optimiser step begins early: later ones depend on its result (docs/decisions/overlap.md).
    early = forwards / learner.optimizer_steps
    figures = {
        f"pool step ({tier})": preview,
        f"regeneration step ({full_tier(config.model)})": full,
        "decode and reward": decoded,
        "training pass": backward,
        "forward without gradient": forward,
        "writing a checkpoint": costs.checkpoint,
    }
    source = f"{ON_ITS_CARD:g} s were measured of FLUX.1-dev on an H100; by the weights that LoRA touches"
    ms = 1000 * ON_ITS_CARD * max(1, arithmetic.facts.touched_parameters) / TOUCHED
    merge = costs.merge or Figure(ms=ms, measured=False, source=source)
    packed = needs_packed(config, config.fleet.explorers.count)
    if packed:
        figures |= {"making a revision": costs.publication, "loading it on a worker": costs.load}
    if is_colocated(config.fleet):
        figures["a revision on its own card"] = merge
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
        load=costs.load.ms / 1000 + _way(config, arithmetic, cluster),
        merge=merge.ms / 1000,
        onload=fitting.seconds(arithmetic, prices.device.host_link) if prices.device else 0.0,
    )
    return Priced(stages=stages, figures=figures, from_data_sheet=costs.from_data_sheet)


def _decode_and_reward(config: Config, costs: ModelCosts) -> Figure:
    """Of an image. Lists have it with CLIPScore, which stands for all rewards that are no language models."""
    found, others = costs.decode_and_reward, [reward.kind for reward in config.rewards if reward.kind != "clipscore"]
    if not others:
        return found
    slow = {kind: reward_kinds.REGISTERED[kind].ms for kind in others if kind in reward_kinds.REGISTERED}
    slow = {kind: ms for kind, ms in slow.items() if ms}
    said = [f"{kind} estimated at {ms:g} ms" for kind, ms in slow.items()]
    if counted := [kind for kind in others if kind not in slow]:
        said.insert(0, f"{', '.join(counted)} counted as CLIPScore")
    ms = found.ms + sum(slow.get(kind, 0) for kind in others)
    return Figure(ms=ms, measured=False, source=f"{'; '.join(said)}; {found.source}")


def _previewed(config: Config, decoded: Figure) -> tuple[float, Figure]:
    """Share of a video's frames that a preview decodes, 1 if all; and the price of decoding, with that in its source.

    The reward is counted with the frames, of which it costs little.
    """
    chosen, frames = config.rollout.preview.latent_frames, config.model.frames
    if not chosen or not frames or is_one_stage(config):
        return 1.0, decoded
    shown = FAMILIES[config.model.family].SIZES.frames(len(chosen))
    source = f"{decoded.source}; a preview decodes {shown} of {frames} frames and is counted with as much of it"
    return shown / frames, decoded.model_copy(update={"measured": False, "source": source})


def _passes(config: Config, costs: ModelCosts) -> tuple[Figure, Figure]:
    """A learner's forward without gradient, and its forward and backward."""
    kept = activation_memory(config)
    if is_compiled(config) and costs.compiled is not None:
        return costs.compiled.forward, costs.compiled.at(kept)
    if kept == 1 or is_compiled(config):
        return costs.forward, costs.backward
    again = Figure(ms=costs.backward.ms + costs.forward.ms, measured=False, source="forward, backward and a forward")
    return costs.forward, costs.backward_checkpointed or again


def _listed(config: Config, facts: ModelFacts, prices: PriceList) -> ModelCosts:
    """The row of the model: its family, parameters and pixels, those of several shapes on average."""
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
    """A solver step in `tier`, of the listed share of quantised weights that is nearest to `share`."""
    if tier not in costs.steps:
        raise Unpriced(
            f"{key} is {tier!r}, for which the price list of {prices.gpu} has no figure with family {costs.family}; it "
            f"has {', '.join(costs.steps)}"
        )
    step = costs.steps[tier]
    if step.weights is None:
        return step
    known = {found.weights: found for found in (step, *costs.scopes.get(tier, ())) if found.weights is not None}
    weights = min(known, key=lambda each: abs(each - share))
    found = known[weights]
    if abs(weights - share) <= SAME_SHARE:
        return found
    return found.scaled(1.0, f"{found.source}; of {weights:.0%} quantised weights, the run has {share:.0%}")


def _traffic(config: Config, arithmetic: Arithmetic, cluster: Cluster) -> float:
    """Seconds of the learner group's traffic between nodes, none of it overlapped."""
    ranks = config.learner.world_size
    nodes = math.ceil(ranks / cluster.gpus_per_node)
    gradient = 2 * (nodes - 1) / nodes * arithmetic.lora_bytes * config.learner.optimizer_steps
    return (gradient + arithmetic.latents_bytes) / (cluster.gigabytes_per_second * 1e9)


def _way(config: Config, arithmetic: Arithmetic, cluster: Cluster) -> float:
    """Seconds in which a node receives a revision; none if every explorer shares a GPU with a learner."""
    alone = config.fleet.explorers.count - on_cards(config, "explorers")
    return arithmetic.revision_bytes / (cluster.gigabytes_per_second * 1e9) if alone else 0.0

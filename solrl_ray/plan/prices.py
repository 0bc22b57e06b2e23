"""Seconds of each stage of a run on a given card, from price lists, which are data.

A price list is a YAML file; those of ``price_lists/`` are shipped. Each figure says whether and on what it was
measured. An unlisted model is scaled from the nearest one of its family, and all its figures are then estimates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import ValidationError

from solrl_ray.config import problems, reward_kinds
from solrl_ray.config.compiled_learner import activation_memory, is_compiled
from solrl_ray.config.loading import read_file
from solrl_ray.config.pools import REGENERATORS, explorers_in_all, is_colocated, needs_packed, on_cards
from solrl_ray.config.schema import Config
from solrl_ray.config.section import AboveZero, Positive, Section
from solrl_ray.config.strategies import full_tier, is_one_stage, pool_sampling
from solrl_ray.errors import UserError
from solrl_ray.models import FAMILIES
from solrl_ray.plan import fitting
from solrl_ray.plan.arithmetic import Arithmetic, ModelFacts
from solrl_ray.plan.iteration import Orchestration, Stages
from solrl_ray.plan.price_list import ONCE, Figure, ModelCosts, PriceList, scaled_from

SHIPPED = Path(__file__).with_name("price_lists")
SAME = 1.05
"""Models whose parameters and image tokens differ by less than this factor count as the same."""
SAME_SHARE = 0.02
"""Shares of quantised weights that differ by at most this count as the same."""
SCALABLE = 8.0
"""Largest factor of work for scaling a figure to another model."""
LONGER = 3.0
"""Largest factor of a video's tokens for the same. Attention grows with their square and is not counted apart: by Wan
2.2's 5B, an iteration of Wan 2.1's 1.3B, with four times the tokens, was planned at less than half of what it took.
"""
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


class Cluster(Section):
    """The machines, for a forecast; the configuration has the number of workers."""

    gpu: str
    """A shipped price list, such as ``h200``, or the path of another one."""
    gpus_per_node: Positive = 8
    gigabytes_per_second: AboveZero = 2.0
    """Bandwidth of a node through the object store."""
    fanout: Positive = 2
    """Nodes to which a holder of a revision sends it at a time."""


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
    """The shipped list called `name`, or the one in the file `name`, complete. Raises UserError if there is none."""
    shipped = shipped_lists()
    path = SHIPPED / f"{name}.yaml" if name in shipped else Path(name)
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


def _no_list(name: str, shipped: Sequence[str]) -> str:
    said, names = f"gpu is {name!r} (--gpu or the cluster's file)", ", ".join(shipped)
    if Path(name).suffix or "/" in name:
        return f"{said}, but there is no such file; name one that is there, or {names}."
    near = problems.nearest(name.lower(), shipped)
    return f"{said}; it must be one of {names}, or a price list in a file{f'; did you mean {near}?' if near else '.'}"


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
    """Seconds of each stage. Raises UserError if the list lacks the model or tier.

    The learner's time is the sum of its passes, then, between nodes, a ring all-reduce of its gradient (2 (n - 1) / n
    times its bytes), and before them the transfer of samples to its node.
    """
    config = arithmetic.config
    costs = _model_costs(config, arithmetic.facts, prices)
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
    # Of the first optimiser step: what comes after depends on its result (docs/decisions/learning-early.md).
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
        onload=fitting.seconds(arithmetic, prices.card.host_link) if prices.card else 0.0,
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
    shown = FAMILIES[config.model.family].sizes.frames(len(chosen))
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


def _model_costs(config: Config, facts: ModelFacts, prices: PriceList) -> ModelCosts:
    """Of the model's family; if the list lacks it, of the one without references, by the tokens of its sequence."""
    family, other = config.model.family, facts.without_references
    if any(listed.family == family for listed in prices.models) or not other:
        return _of_family(family, config, facts, prices)
    costs = _of_family(other, config, facts, prices)
    if costs.tokens is None:
        return costs
    ratio = facts.tokens / (costs.tokens * config.model.shapes.volume / costs.shape.volume)

    def seeing(name: str, figure: Figure) -> Figure:
        if name in (*ONCE, "decode_and_reward"):
            return figure
        return figure.scaled(ratio, f"{figure.source}; scaled by {ratio:.3g}, the ratio of tokens with references")

    return costs.each(seeing)


def _of_family(family: str, config: Config, facts: ModelFacts, prices: PriceList) -> ModelCosts:
    model = config.model
    ratios = [
        (facts.parameters / listed.parameters, _longer(config, facts, listed), listed)
        for listed in prices.models
        if listed.family == family
    ]
    for weights, tokens, listed in ratios:
        if 1 / SAME <= weights <= SAME and 1 / SAME <= tokens <= SAME:
            return listed
    within = [each for each in ratios if not each[2].frames or 1 / LONGER <= each[1] <= LONGER]
    nearest = min(within, key=lambda each: abs(math.log(each[0] * each[1])), default=None)
    if nearest is None or not 1 / SCALABLE <= nearest[0] * nearest[1] <= SCALABLE:
        shown = [each[2] for each in ratios] or prices.models
        listed_names = ", ".join(f"{m.family} at {m.shape} ({_size(m)})" for m in shown) or "no models"
        raise UserError(
            f"The price list of {prices.gpu} has nothing like {model.path} at {model.shapes} (family "
            f"{model.family}, {_size(facts)}); it has {listed_names}. Name a list of your own with --gpu FILE."
        )
    weights, tokens, listed = nearest

    def scaled(name: str, figure: Figure) -> Figure:
        factor, ratio = weights * tokens, "parameters x image tokens"
        if name in ONCE:
            factor, ratio = weights, "parameters"
        elif name == "decode_and_reward":
            factor, ratio = model.shapes.volume / listed.shape.volume, "pixels"
        return figure.scaled(factor, f"{figure.source}; scaled by {factor:.2g}, the ratio of {ratio}")

    return listed.each(scaled).model_copy(update={"parameters": facts.parameters})


def _size(of: ModelFacts | ModelCosts) -> str:
    """What must be alike."""
    return f"{of.parameters / 1e9:.2g} B parameters" + (f", {of.tokens:,} tokens" if of.tokens else "")


def _longer(config: Config, facts: ModelFacts, listed: ModelCosts) -> float:
    """Ratio of tokens: of videos as counted, because autoencoders of one family differ; else by pixels."""
    shapes = config.model.shapes
    if listed.frames and listed.tokens and facts.tokens:
        return facts.tokens / listed.tokens * shapes.volume / shapes.smallest.volume  # counted of the smallest
    return config.model.shapes.volume / listed.shape.volume


def _step(costs: ModelCosts, tier: str, key: str, prices: PriceList, share: float = 0.0) -> Figure:
    """A solver step in `tier`, with that share of the weights quantised."""
    if tier not in costs.steps:
        raise UserError(
            f"{key} comes to {tier!r}, for which the price list of {prices.gpu} has no figure with family "
            f"{costs.family}; it has {', '.join(costs.steps)}."
        )
    step = costs.steps[tier]
    if step.weights is None:
        return step
    known = {found.weights: found for found in (step, *costs.scopes.get(tier, ())) if found.weights is not None}
    nearest = min(known, key=lambda weights: abs(weights - share))
    if abs(nearest - share) <= SAME_SHARE:
        return known[nearest]
    times = {0.0: costs.steps["bf16"].ms} if "bf16" in costs.steps else {}
    times |= {weights: found.ms for weights, found in known.items()}
    shares = sorted(times)
    ms = float(np.interp(share, shares, [times[each] for each in shares]))
    listed = ", ".join(f"{times[each]:.3g} ms with {each:.0%}" for each in shares)
    return Figure(ms=ms, measured=False, source=f"{share:.0%} of the weights quantised; {listed}")


def _traffic(config: Config, arithmetic: Arithmetic, cluster: Cluster) -> float:
    """Seconds of the learner group's traffic between nodes, none of it overlapped."""
    ranks = config.learner.world_size
    nodes = math.ceil(ranks / cluster.gpus_per_node)
    gradient = 2 * (nodes - 1) / nodes * arithmetic.lora_bytes * config.learner.optimizer_steps
    return (gradient + arithmetic.latents_bytes) / (cluster.gigabytes_per_second * 1e9)


def _way(config: Config, arithmetic: Arithmetic, cluster: Cluster) -> float:
    """Seconds until the last node of working explorers has a revision; those on cards need none.

    A holder sends it to `fanout` others at a time: a round multiplies the holders by fanout + 1 and takes as long as
    one node needs to send `fanout` copies. Regenerators' nodes are served last.
    """
    units = config.rollout.prompts * pool_sampling(config).units
    alone = explorers_in_all(config.fleet) - on_cards(config, "explorers")
    regenerators = config.fleet.regenerators.count - on_cards(config, REGENERATORS)
    nodes = sum(math.ceil(count / cluster.gpus_per_node) for count in (alone, regenerators))
    working = math.ceil(min(alone, units) / cluster.gpus_per_node)
    if not working:
        return 0.0
    fanout = min(cluster.fanout, nodes)
    rounds = math.ceil(math.log(working + 1, fanout + 1) - 1e-9)
    return rounds * fanout * arithmetic.revision_bytes / (cluster.gigabytes_per_second * 1e9)

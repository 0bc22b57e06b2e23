"""One copy of a model for all roles of a card: no bit differs from that of a role with a process of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from solrl_ray import models
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.gpu import shared_model
from solrl_ray.gpu.shared_model import SharedModel
from solrl_ray.models.base import DiffusionModel
from solrl_ray.policy import adapters
from solrl_ray.quantization.emulation import EmulatedNVFP4Linear
from solrl_ray.quantization.scope import quantize_, quantized_layers
from solrl_ray.weight_sync.manifest import Expected
from solrl_ray.weight_sync.payload import Payload, Revision, Unusable
from solrl_ray.weight_sync.publication import CARD, EXPLORER, REGENERATOR
from solrl_ray.weight_sync.publish import Publisher, assemble, touched_linears
from solrl_ray.weight_sync.receive import Receiver
from tests.support import tiny
from tests.support.learning import config
from tests.support.weight_sync import publication

CPU = torch.device("cpu")
SKIPPED = ["to_out", "norm", "embed"]
"""Leaves linears of all kinds: LoRA touches some of those that are quantised and some that are not."""
TIERS = [("nvfp4-emulated", "float32"), ("fp8", "bfloat16")]
SCALES = (0.0, 0.03, 2.0, 0.03)
"""Of the factors of each revision: those of the third outgrow NVFP4's frozen scales."""


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantise to all tiers. Weights are in memory that can be freed: not in the file's."""
    load = models.load

    def loaded(*arguments: Any, **keywords: Any) -> DiffusionModel:
        model = load(*arguments, **keywords)
        for weight in model.transformer.parameters():
            weight.data = weight.data.clone()
        return model

    monkeypatch.setattr(models, "load", loaded)
    monkeypatch.setattr(shared_model, "quantize_", partial(quantize_, without_kernels=True))


def settings(pipeline: Path, tier: str = "nvfp4-emulated", dtype: str = "float32", *, offload: bool = False) -> Config:
    return config(
        pipeline,
        model=tiny.model_config(pipeline, dtype=dtype, quantization={"skip": SKIPPED}),
        rollout={"explore": {"precision": tier}, "regenerate": {"steps": 5}},
        fleet={"placement": "colocated", "offload": offload},
    )


class Card:
    """The roles of a card, without a process."""

    def __init__(self, settings: Config) -> None:
        self.settings, self.shared = settings, SharedModel(settings)
        self.explorer = self._tree()
        _, self.explores = self.shared.quantized(self.explorer, settings)
        self.regenerator = self._tree()
        self.regenerates = self.shared.merged(self.regenerator)
        self.learner = self._tree()
        adapters.attach(self.learner, settings.model.lora, run_seed=7)

    def _tree(self) -> nn.Module:
        return self.shared.load(CPU, {"transformer"}).transformer

    def publish(self, number: int) -> Revision:
        """As its learner does."""
        self.shared.bring_weights_for("learner")
        return revision(self.settings, number, self.learner)

    def load(self, role: str, revision: Revision) -> Expected:
        """Have a role take the factors of a revision and begin to compute; what its receipt states."""
        receiver = self.explores if role == EXPLORER else self.regenerates
        bound, digest = self.shared.apply(receiver, factors_of(revision))
        self.shared.bring_weights_for(EXPLORER if role == EXPLORER else "regenerator")
        return Expected(modules=bound, digest=digest)


def alone(settings: Config, tier: str = "") -> nn.Module:
    """The transformer of a process of its own, an explorer's with a `tier`."""
    transformer = models.load(settings.model, CPU, components={"transformer"}).transformer
    if tier:
        quantize_(transformer, tier, settings.model.quantization, without_kernels=True)
    return transformer


def factors(settings: Config, number: int) -> dict[str, torch.Tensor]:
    generator, rank = torch.Generator().manual_seed(number), settings.model.lora.rank
    made = {}
    for path, linear in touched_linears(alone(settings), settings.model.lora.targets).items():
        made[f"{path}.lora_A"] = torch.randn(rank, linear.in_features, generator=generator) * SCALES[number]
        made[f"{path}.lora_B"] = torch.randn(linear.out_features, rank, generator=generator) * SCALES[number]
    return made


def revision(settings: Config, number: int, transformer: nn.Module | None = None, *, pack: bool = False) -> Revision:
    """Made from a learner's transformer, by default from one of its own."""
    base, tier = alone(settings) if transformer is None else transformer, settings.rollout.explore.precision
    publisher = Publisher.for_model(base, settings, tier=tier)
    made = factors(settings, number)
    return assemble([publisher.shard(number, made, pack=pack)], settings.model.lora, made)


def factors_of(revision: Revision) -> Payload:
    return publication(revision).payload(REGENERATOR)


def weights(transformer: nn.Module) -> dict[str, torch.Tensor]:
    """By the paths that they have without adapters: all but the adapters' own."""
    named = {name.replace(".base_layer", ""): tensor for name, tensor in transformer.named_parameters()}
    return {name: tensor for name, tensor in named.items() if ".lora_" not in name}


def copies(transformer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights(transformer).items()}


def differing(found: nn.Module, expected: dict[str, torch.Tensor]) -> set[str]:
    present = weights(found)
    assert present.keys() == expected.keys()
    return {name for name, tensor in expected.items() if not torch.equal(present[name], tensor)}


def assert_explores_as(found: nn.Module, expected: nn.Module) -> None:
    """Every stored byte is equal, of quantised layers and of all others."""
    for path, layer in quantized_layers(expected).items():
        same = {name: torch.equal(found.get_submodule(path).tensors()[name], t) for name, t in layer.tensors().items()}
        assert all(same.values()), (path, same)
    assert differing(found, copies(expected)) == set()


def is_freed(transformer: nn.Module) -> set[bool]:
    """Whether its quantised layers have no memory."""
    stored = [tensor for layer in quantized_layers(transformer).values() for tensor in layer.tensors().values()]
    return {tensor.untyped_storage().nbytes() == 0 for tensor in stored}


def test_roles_share_every_tensor_but_quantised_ones_and_those_that_an_explorer_merges(tiny_pipeline: Path) -> None:
    card = Card(settings(tiny_pipeline))
    of_regenerator, of_learner, of_explorer = map(weights, (card.regenerator, card.learner, card.explorer))
    assert of_regenerator.keys() == of_learner.keys()
    assert {n for n, t in of_regenerator.items() if t.data_ptr() != of_learner[n].data_ptr()} == set()
    quantized = {f"{path}.weight" for path in quantized_layers(card.explorer)}
    own = {name for name, tensor in of_explorer.items() if tensor.data_ptr() != of_regenerator[name].data_ptr()}
    assert own == {"transformer_blocks.0.attn.to_out.0.weight"}  # of LoRA's targets, the only one that is skipped
    biases = {name.removesuffix("weight") + "bias" for name in quantized}  # are buffers of quantised layers
    assert of_regenerator.keys() - of_explorer.keys() == quantized | (biases & of_regenerator.keys())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_policy_goes_for_the_learner_and_comes_back_bit_for_bit(tiny_pipeline: Path, dtype: str) -> None:
    ours = settings(tiny_pipeline, dtype=dtype)
    card, base = Card(ours), copies(alone(ours))
    touched = {f"{path}.weight" for path in touched_linears(alone(ours), ours.model.lora.targets)}
    for number in (1, 2, 3):
        made = card.publish(number)
        separate = alone(ours)
        bound, digest = Receiver(separate).apply(factors_of(made))
        assert card.load(REGENERATOR, made) == Expected(modules=bound, digest=digest)
        assert differing(card.regenerator, copies(separate)) == set()
        assert differing(card.regenerator, base) == touched
        card.shared.bring_weights_for("learner")
        assert differing(card.learner, base) == set()
        card.shared.bring_weights_for("regenerator")
        assert differing(card.regenerator, copies(separate)) == set()


@pytest.mark.parametrize(("tier", "dtype"), TIERS)
def test_an_explorer_holds_the_bytes_of_one_with_a_process_of_its_own_after_each_revision(
    tiny_pipeline: Path, tier: str, dtype: str
) -> None:
    ours = settings(tiny_pipeline, tier, dtype)
    card = Card(ours)
    assert_explores_as(card.explorer, alone(ours, tier))
    card.shared.bring_weights_for("learner")
    assert is_freed(card.explorer) == {True}
    card.shared.bring_weights_for("explorer")
    assert_explores_as(card.explorer, alone(ours, tier))
    for number in range(4):
        packed = revision(ours, number, pack=True)
        assert bool(packed.manifest.bumped) == (number == 2 and tier == "nvfp4-emulated")
        separate = alone(ours, tier)
        bound, digest = Receiver(separate).apply(publication(packed).payload(EXPLORER))
        made = card.publish(number)
        assert card.load(EXPLORER, made) == Expected(modules=bound, digest=digest)
        assert_explores_as(card.explorer, separate)
        card.load(REGENERATOR, made)
        assert_explores_as(card.explorer, separate)  # they take turns within an iteration
        for other in ("learner", "encoder"):
            card.shared.bring_weights_for(other)  # type: ignore[arg-type]
            assert is_freed(card.explorer) == {True}
            card.shared.bring_weights_for("explorer")
            assert_explores_as(card.explorer, separate)


def test_what_a_card_holds_is_what_a_packed_revision_states(tiny_pipeline: Path) -> None:
    ours = settings(tiny_pipeline)
    without, packed = revision(ours, 1), revision(ours, 1, pack=True)
    assert without.packed == {}
    assert without.manifest == packed.manifest
    card = Card(ours)
    assert card.load(EXPLORER, without) == packed.manifest.expected[EXPLORER]
    assert card.load(REGENERATOR, without) == packed.manifest.expected[REGENERATOR]


def test_a_manifest_is_enough_where_the_learner_holds_its_factors(tiny_pipeline: Path) -> None:
    ours = settings(tiny_pipeline)
    card = Card(ours)
    made = publication(card.publish(1))
    short = made.payload(CARD)
    assert short.tensors == {}
    for others in (None, lambda policy: factors(ours, 2)):
        card.shared.factors = others
        for receiver in (card.explores, card.regenerates):
            with pytest.raises(Unusable, match="revision-000001 came without its factors"):
                card.shared.apply(receiver, short)
    card.shared.bring_weights_for("explorer")
    assert_explores_as(card.explorer, alone(ours, "nvfp4-emulated"))  # nothing has changed
    card.shared.factors = lambda policy: factors(ours, 1)
    for role, receiver in ((EXPLORER, card.explores), (REGENERATOR, card.regenerates)):
        bound, digest = card.shared.apply(receiver, short)
        assert Expected(modules=bound, digest=digest) == made.revision.manifest.expected[role]
    assert made.payload(CARD, full=True).tensors.keys() == factors(ours, 1).keys()


def test_layers_that_are_made_ahead_of_a_revision_end_with_it_or_with_the_one_before(tiny_pipeline: Path) -> None:
    ours = settings(tiny_pipeline)
    card = Card(ours)
    touched = touched_linears(alone(ours), ours.model.lora.targets).keys() & quantized_layers(card.explorer).keys()
    before = alone(ours, "nvfp4-emulated")
    for number in (1, 2):
        made = card.publish(number)
        card.shared.prepare()
        layers = quantized_layers(card.explorer)
        assert {path for path, layer in layers.items() if is_freed(layer) == {False}} == layers.keys() - touched
        if number == 2:  # another role's call comes first, and the explorer's next one before the revision
            card.shared.bring_weights_for("regenerator")
            card.shared.bring_weights_for("explorer")
            assert_explores_as(card.explorer, before)
            card.publish(number)
            card.shared.prepare()
        before = alone(ours, "nvfp4-emulated")
        Receiver(before).apply(publication(revision(ours, number, pack=True)).payload(EXPLORER))
        assert card.load(EXPLORER, made) == made.manifest.expected[EXPLORER]
        assert_explores_as(card.explorer, before)


# With `fleet.offload`


def test_frozen_weights_leave_while_their_copies_explore_and_come_back_bit_for_bit(tiny_pipeline: Path) -> None:
    ours = settings(tiny_pipeline, offload=True)
    card, base = Card(ours), copies(alone(ours))
    touched = {f"{path}.weight" for path in touched_linears(alone(ours), ours.model.lora.targets)}
    frozen = {f"{path}.weight" for path in quantized_layers(card.explorer)} - touched
    made = revision(ours, 1)
    separate = alone(ours, "nvfp4-emulated")
    Receiver(separate).apply(publication(revision(ours, 1, pack=True)).payload(EXPLORER))

    def away() -> set[str]:
        return {name for name, tensor in weights(card.regenerator).items() if tensor.untyped_storage().nbytes() == 0}

    assert away() == frozen
    card.load(EXPLORER, made)
    for role in ("regenerator", "learner"):
        assert away() == frozen
        assert_explores_as(card.explorer, separate)
        card.shared.bring_weights_for("encoder")
        assert away() == frozen
        assert is_freed(card.explorer) == {True}
        if role == "learner":  # else the frozen weights come back from there
            card.shared.bring_weights_for("explorer")
            assert away() == frozen
            assert_explores_as(card.explorer, separate)
        if role == "regenerator":
            card.load(REGENERATOR, made)
        else:
            card.shared.bring_weights_for("learner")
        assert away() == set()
        assert is_freed(card.explorer) == {True}
        assert differing(card.learner, base) == (touched if role == "regenerator" else set())
        card.shared.bring_weights_for("explorer")
    card.shared.leave("explorer")
    assert away() == set()


def test_a_frozen_weight_leaves_before_the_next_one_is_quantised(
    tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = settings(tiny_pipeline, offload=True)
    card, away = Card(ours), list[int]()
    card.shared.leave("explorer")
    quantise = EmulatedNVFP4Linear.from_linear

    def noting(linear: nn.Linear) -> EmulatedNVFP4Linear:
        away.append(sum(tensor.untyped_storage().nbytes() == 0 for tensor in weights(card.learner).values()))
        return quantise(linear)

    monkeypatch.setattr(EmulatedNVFP4Linear, "from_linear", noting)
    successor = card._tree()
    card.shared.quantized(successor, ours)
    frozen = [path not in card.shared._base for path in quantized_layers(successor)]
    assert away == [sum(frozen[:done]) for done in range(len(frozen))]
    assert sum(frozen) > 1


def test_a_weight_that_comes_back_altered_ends_the_run_by_its_name(tiny_pipeline: Path) -> None:
    card = Card(settings(tiny_pipeline, offload=True))
    assert card.shared._explored is not None
    host, _ = card.shared._explored.frozen._host["proj_out"]
    host.view(torch.uint8)[0, 0] ^= 1  # as memory that is damaged does
    with pytest.raises(RunError, match="proj_out came back to the device altered"):
        card.shared.bring_weights_for("regenerator")


# Roles that leave


def test_a_role_that_leaves_frees_its_own_tensors_and_another_begins_as_new(tiny_pipeline: Path) -> None:
    ours = settings(tiny_pipeline)
    card, base, made = Card(ours), copies(alone(ours)), revision(ours, 1)
    card.load(EXPLORER, made)
    card.load(REGENERATOR, made)
    card.shared.leave("explorer")
    assert is_freed(card.explorer) == {True}
    assert differing(card.learner, base)  # the regenerator is there still
    card.shared.leave("regenerator")
    assert differing(card.learner, base) == set()
    for role in ("regenerator", "learner"):
        card.shared.bring_weights_for(role)  # type: ignore[arg-type]
        assert differing(card.learner, base) == set()
    successor = card._tree()
    _, receiver = card.shared.quantized(successor, ours)
    assert_explores_as(successor, alone(ours, "nvfp4-emulated"))
    bound, digest = card.shared.apply(receiver, factors_of(made))
    assert Expected(modules=bound, digest=digest) == made.manifest.expected[EXPLORER]


def test_a_role_that_starts_while_a_policy_is_merged_finds_the_base(tiny_pipeline: Path) -> None:
    ours = settings(tiny_pipeline)
    card, base, made = Card(ours), copies(alone(ours)), revision(ours, 1)
    card.load(REGENERATOR, made)
    newcomer = card._tree()
    assert differing(newcomer, base) == set()
    publisher = Publisher.for_model(newcomer, ours, tier="nvfp4-emulated")
    assert publisher.build(1, factors(ours, 1)).manifest == made.manifest
    card.shared.bring_weights_for("regenerator")
    separate = alone(ours)
    Receiver(separate).apply(factors_of(made))
    assert differing(card.regenerator, copies(separate)) == set()

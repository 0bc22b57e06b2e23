"""Weights that are laid down and taken up again: the same bits, tensors and compiled code, and memory that is free."""

from typing import Any

import pytest
import torch
from torch import nn

from solrl_ray.config.schema import QuantizationScope
from solrl_ray.errors import RunError
from solrl_ray.models.host_memory import Room
from solrl_ray.models.resting import RestingWeights, tensors_of
from solrl_ray.quantization.layers import QuantizedLinear
from solrl_ray.quantization.scope import quantize_
from tests.unit.quantization.test_scope import SKIP, inputs, transformer

CPU = torch.device("cpu")


def tensors(module: nn.Module) -> list[torch.Tensor]:
    return list(tensors_of(module))


def held(module: nn.Module) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors(module)}
    return sum(storage.nbytes() for storage in storages.values())


def test_a_transformer_computes_the_same_bits_after_a_rest() -> None:
    model = transformer()
    before, size, names = model(**inputs())[0], held(model), [id(tensor) for tensor in tensors(model)]
    resting = RestingWeights()
    for _ in range(3):
        assert resting.lay_down(tensors(model), CPU) == size
        assert resting.is_down
        assert held(model) == 0
        assert resting.take_up() == size
        assert not resting.is_down
        assert torch.equal(model(**inputs())[0], before)
    assert [id(tensor) for tensor in tensors(model)] == names


def test_compiled_code_is_not_compiled_again() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).requires_grad_(False)
    compiled, x = torch.compile(model, backend="aot_eager"), torch.ones(2, 16)
    before = compiled(x)
    resting = RestingWeights()
    resting.lay_down(tensors(model), CPU)
    resting.take_up()
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(x), before)


def test_what_was_written_in_between_is_what_comes_back() -> None:
    linear = nn.Linear(8, 8)
    resting = RestingWeights()
    resting.lay_down(tensors(linear), CPU)
    resting.take_up()
    with torch.no_grad():
        linear.weight.copy_(torch.eye(8))
    linear.bias.data.fill_(3.0)  # does not count as a change for autograd
    resting.lay_down(tensors(linear), CPU)
    resting.take_up()
    assert torch.equal(linear.weight, torch.eye(8))
    assert torch.equal(linear.bias, torch.full((8,), 3.0))


def test_what_has_not_changed_is_not_copied_again() -> None:
    linear = nn.Linear(8, 8)
    resting = RestingWeights()
    resting.lay_down(tensors(linear), CPU)
    resting.take_up()
    next(iter(resting._pieces.values())).host[0] ^= 1  # a copy would mend this
    resting.lay_down(tensors(linear), CPU)
    with pytest.raises(RunError):
        resting.take_up()


def test_views_share_their_memory_and_odd_sizes_are_kept() -> None:
    whole = torch.arange(13, dtype=torch.uint8)
    view, empty = whole[2:5], torch.empty(0)
    resting = RestingWeights()
    assert resting.lay_down([whole, view, empty], CPU) == 13
    resting.take_up()
    assert whole.tolist() == list(range(13))
    assert view.tolist() == [2, 3, 4]


class Wrapper(torch.Tensor):
    """Has a size and no memory of its own, as Transformer Engine's quantised tensors."""

    @staticmethod
    def __new__(cls, size: int) -> "Wrapper":
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, (size,))
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        raise NotImplementedError


def test_what_has_no_memory_of_its_own_or_is_elsewhere_stays() -> None:
    resting = RestingWeights()
    assert resting.lay_down([Wrapper(8), torch.ones(4)], torch.device("cuda", 0)) == 0
    assert resting.lay_down([Wrapper(8), torch.ones(4)], CPU) == 16


def test_both_calls_may_come_twice() -> None:
    tensor = torch.ones(4)
    resting = RestingWeights()
    assert resting.take_up() == 0
    resting.lay_down([tensor], CPU)
    assert resting.lay_down([tensor], CPU) == 0
    resting.take_up()
    assert resting.take_up() == 0
    assert tensor.tolist() == [1.0] * 4


def test_memory_that_is_not_sound_is_named() -> None:
    tensor = torch.ones(4)
    resting = RestingWeights()
    resting.lay_down([tensor], CPU)
    next(iter(resting._pieces.values())).host[3] ^= 1
    with pytest.raises(RunError, match="weights came back to the GPU altered; its memory is faulty"):
        resting.take_up()


def test_a_host_without_memory_is_named() -> None:
    with pytest.raises(
        RunError, match=r"1000000\.0 GB of host memory for weights that are laid down cannot be allocated \(out"
    ):
        Room(10**15, pinned=False)


@torch.no_grad()
def test_packed_weights_of_a_quantised_layer_rest_too() -> None:
    model = transformer()
    quantize_(model, "nvfp4-emulated", QuantizationScope(skip=SKIP))
    packed = [tensor for m in model.modules() if isinstance(m, QuantizedLinear) for tensor in m.tensors().values()]
    before = model(**inputs())[0]
    resting = RestingWeights()
    resting.lay_down(tensors(model), CPU)
    assert packed
    assert not any(tensor.untyped_storage().nbytes() for tensor in packed)
    resting.take_up()
    assert torch.equal(model(**inputs())[0], before)

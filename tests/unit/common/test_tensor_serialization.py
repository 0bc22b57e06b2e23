"""Records with tensors that cross to another process: equal there, and never pickled byte by byte."""

import pickle
from dataclasses import dataclass

import pytest
import torch

from solrl_ray.common.tensor_serialization import Portable
from solrl_ray.learning.state import LearnerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Portable):
    name: str
    whole: torch.Tensor
    parts: dict[str, torch.Tensor]
    counts: dict[str, int]


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)])
def test_a_tensor_of_any_type_and_shape_arrives_with_its_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = (torch.arange(12, dtype=torch.float32)[: torch.Size(shape).numel()].reshape(shape) - 4).abs().to(dtype)
    arrived = pickle.loads(pickle.dumps(Record(name="a", whole=sent, parts={"b": sent}, counts={"c": 3})))
    for tensor in (arrived.whole, arrived.parts["b"]):
        assert tensor.dtype == dtype
        assert tensor.shape == torch.Size(shape)
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))
    assert (arrived.name, arrived.counts) == ("a", {"c": 3})


def test_a_tensor_that_is_not_contiguous_arrives_as_it_reads() -> None:
    sent = torch.arange(12.0).reshape(3, 4).t()
    arrived = pickle.loads(pickle.dumps(Record(name="", whole=sent, parts={}, counts={})))
    assert torch.equal(arrived.whole, sent)


def test_the_bytes_travel_beside_the_pickle_and_what_arrives_is_the_receivers_own() -> None:
    factors = {"m.lora_A": torch.randn(64, 64)}
    parts = {name: factors for name in ("default", "old", "ema", "exp_avg", "exp_avg_sq")}
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(LearnerState(updates=1, steps=2, **parts), protocol=5, buffer_callback=buffers.append)
    assert len(message) < 4096
    assert sum(buffer.raw().nbytes for buffer in buffers) == 5 * 64 * 64 * 4
    shared = [bytes(buffer.raw()) for buffer in buffers]  # read-only, as in an object store
    arrived = pickle.loads(message, buffers=shared)
    assert torch.equal(arrived.ema["m.lora_A"], factors["m.lora_A"])
    arrived.ema["m.lora_A"].zero_()
    assert torch.equal(pickle.loads(message, buffers=shared).ema["m.lora_A"], factors["m.lora_A"])

"""What payloads are written as: the bytes of safetensors, and nothing that stays in memory."""

import gc

import safetensors.torch
import torch

from solrl_ray.weight_sync import container


def test_a_file_has_the_bytes_that_safetensors_itself_writes() -> None:
    tensors = {
        "matrix": torch.arange(12.0).reshape(3, 4).T,
        "half": torch.ones(5, dtype=torch.bfloat16),
        "codes": torch.arange(7, dtype=torch.uint8),
        "eight": torch.ones(2, 3).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "nothing": torch.empty(0, 4),
        "flag": torch.tensor([True]),
    }
    metadata = {"revision": "7"}
    expected = safetensors.torch.save({name: t.contiguous() for name, t in tensors.items()}, metadata=metadata)
    assert container.write(tensors, metadata) == expected


def types() -> int:
    gc.collect()
    return sum(issubclass(type(found), type) for found in gc.get_objects())


def test_no_length_that_is_written_leaves_a_type_behind() -> None:
    container.write({"delta": torch.zeros(1000, dtype=torch.uint8)}, {})
    before = types()
    for length in range(1001, 1051):
        container.write({"delta": torch.zeros(length, dtype=torch.uint8)}, {})
    assert types() == before

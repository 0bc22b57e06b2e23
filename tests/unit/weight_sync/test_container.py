"""What payloads are written as: the bytes of safetensors."""

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
    metadata = {"revision": "10007"}  # for a header that is padded by more than four bytes
    expected = safetensors.torch.save({name: t.contiguous() for name, t in tensors.items()}, metadata=metadata)
    assert container.write(tensors, metadata) == expected

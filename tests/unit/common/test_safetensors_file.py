"""Safetensors files: their metadata, and refusals of damaged ones."""

import json

import pytest
import safetensors.torch
import torch

from solrl_ray.common import safetensors_file

TENSORS = {"a.lora_A": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.uint8)}
CONTENT = safetensors.torch.save(TENSORS, metadata={"group": "m"})
START = 8 + int.from_bytes(CONTENT[:8], "little")


def test_the_names_of_types_are_those_of_safetensors() -> None:
    names = safetensors_file.DTYPES
    content = safetensors.torch.save({name: torch.zeros(1).to(dtype) for name, dtype in names.items()})
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert {name: entry["dtype"] for name, entry in header.items()} == {name: name for name in names}


def test_a_file_is_read_with_its_metadata() -> None:
    metadata, tensors = safetensors_file.read(CONTENT)
    assert metadata == {"group": "m"}
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:20], CONTENT[:5], b"", CONTENT + b"\0"])
def test_a_file_that_is_cut_off_or_too_long_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="no whole safetensors file"):
        safetensors_file.read(content)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data_offsets", [4.5, 24]),
        ("data_offsets", [4.5]),
        ("data_offsets", [24, 0]),
        ("data_offsets", [0, 24, 48]),
        ("data_offsets", "0,24"),
        ("data_offsets", [-24, 0]),
        ("shape", [2, 3.0]),
        ("shape", ["2", 3]),
        ("shape", [2, True, 3]),
        ("shape", [-2, -3]),
        ("shape", [3, 3]),
        ("shape", 6),
        ("dtype", "F7"),
        ("dtype", None),
    ],
)
def test_a_header_of_wrong_types_or_sizes_is_refused(key: str, value: object) -> None:
    header = json.loads(CONTENT[8:START])
    header["a.lora_A"][key] = value
    text = json.dumps(header).encode()
    with pytest.raises(ValueError, match="no whole safetensors file"):
        safetensors_file.read(len(text).to_bytes(8, "little") + text + CONTENT[START:])


def test_each_flipped_bit_of_a_header_is_refused_or_changes_nothing_that_is_checked() -> None:
    for bit in range(8 * START):
        altered = bytearray(CONTENT)
        altered[bit // 8] ^= 1 << bit % 8
        try:
            _, tensors = safetensors_file.read(bytes(altered))
        except ValueError:
            continue
        assert sum(tensor.nbytes for tensor in tensors.values()) == len(CONTENT) - START

"""Checksums of tensors: one number on every device, which accidents change."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter

import pytest
import torch

from solrl_ray.weight_sync.checksums import COLUMNS, Stamp, stamp, stamps, stamps_digest, tensors_digest
from tests.support.tensors import randn

ALL = (1 << 64) - 1


def permuted(number: int) -> int:
    for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        number = number * factor & ALL
        number = number + (number * number | 5) & ALL
    return number


def weight(place: int) -> int:
    row, column = divmod(place, 1 << 14)
    return (1 + 2 * permuted(column)) * (1 + (permuted(row) << 15)) & ALL


def by_hand(content: bytes) -> int:
    """The checksum of the module's first lines, word by word."""
    filled = content + bytes(-len(content) % 4)
    words = [int.from_bytes(filled[at : at + 4], "little", signed=True) for at in range(0, len(filled), 4)]
    return sum(word * weight(place) for place, word in enumerate(words)) & ALL


def content_of(size: int, seed: int = 0) -> torch.Tensor:
    """Random bytes, uint8 [size]."""
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def checksum(tensor: torch.Tensor) -> int:
    return stamp(tensor).checksum


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 4095, 4 * COLUMNS - 1, 4 * COLUMNS, 4 * COLUMNS + 1, 9 * COLUMNS])
def test_a_checksum_is_the_number_worked_out_word_by_word(size: int) -> None:
    content = content_of(size)
    assert stamp(content) == Stamp("U8", (size,), by_hand(content.numpy().tobytes()))


def test_a_checksum_is_of_bytes_whatever_their_type() -> None:
    content = content_of(48)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.float64):
        assert checksum(content.view(dtype)) == checksum(content)
    assert stamp(torch.ones(())) == Stamp("F32", (), by_hand(bytes([0, 0, 128, 63])))
    assert stamp(torch.tensor([True, False, True])) == Stamp("BOOL", (3,), by_hand(bytes([1, 0, 1])))


def test_a_stamp_is_of_rows_and_not_of_memory() -> None:
    x = randn(3, 5)
    assert stamp(x.t()) == stamp(x.t().contiguous()) != stamp(x)
    content = content_of(4001)
    for start in (1, 2, 4):  # not aligned to words
        assert stamp(content[start:]) == stamp(content[start:].clone())
    assert stamp(content[::3]) == stamp(content[::3].clone())


def test_equal_changes_of_many_tensors_are_found_by_name() -> None:
    found = stamps({"a": torch.zeros(3), "b": content_of(7), "c": torch.zeros(3)})
    assert list(found) == ["a", "b", "c"]
    assert found["a"] == found["c"] == Stamp("F32", (3,), 0)
    assert found["b"] == stamp(content_of(7))


def test_each_flipped_bit_changes_the_checksum() -> None:
    content = content_of(8 * COLUMNS + 10)
    expected, known = by_hand(content.numpy().tobytes()), checksum(content)
    assert known == expected
    for at in (*range(64), *range(4 * COLUMNS - 8, 4 * COLUMNS + 8), *range(8 * COLUMNS, len(content))):
        for bit in range(8):
            content[at] ^= 1 << bit
            assert checksum(content) != known
            content[at] ^= 1 << bit


def test_each_two_different_words_that_change_places_change_the_checksum() -> None:
    """Words that differ in their highest bit alone are the hardest; so are places far apart by a power of two."""
    places = [0, 1, 2, 3, 1 << 8, 1 << 13, (1 << 14) - 1, 1 << 14, 1 << 15, 3 << 14, (1 << 18) + 5]
    words = torch.zeros((1 << 18) + 6, dtype=torch.int32)
    for one, other in [(i, j) for i in places for j in places if i < j]:
        for differing in (1, 1 << 15, -(1 << 31)):
            words[one], words[other] = differing, 0
            before = checksum(words)
            words[one], words[other] = 0, differing
            assert checksum(words) != before
            words[other] = 0


def test_the_weights_of_two_words_differ_by_no_higher_power_of_two_than_twice_their_distance() -> None:
    """From which follows that any two words that change places are noticed: 32 bits of a word and 32 of its place."""
    for distance in range(32):
        for start in (0, 1, 77, 16383):
            difference = weight(start) - weight(start + (1 << distance))
            assert difference & -difference == 2 << distance
    assert all(weight(place) & 1 for place in range(0, 1 << 20, 997))


def test_random_changes_of_highest_bits_are_noticed() -> None:
    """Changes of the fewest bits that a checksum takes into account, many of them in one tensor."""
    generator, found = torch.Generator().manual_seed(3), Counter[int]()
    for _ in range(2000):
        count = int(torch.randint(2, 40, (), generator=generator))
        words = torch.zeros(1 << 12, dtype=torch.int32)
        words[torch.randint(0, len(words), (count,), generator=generator)] = -(1 << 31)
        found[checksum(words)] += 1
    assert found.most_common(1)[0][1] == 1


def test_equal_tensors_under_other_names_or_shapes_have_other_digests() -> None:
    x = torch.arange(4.0)
    digests = {tensors_digest({"a": x}), tensors_digest({"b": x}), tensors_digest({"a": x.view(2, 2)})}
    assert len(digests) == 3
    assert tensors_digest({"a": x, "b": x}) == tensors_digest({"b": x, "a": copy.deepcopy(x)})
    line = b"a F32 4,48 0000000000000001\n"
    assert stamps_digest({"a": Stamp("F32", (4, 48), 1)}) == hashlib.sha256(line).hexdigest()

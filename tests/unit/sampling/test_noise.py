"""Address → random numbers: published vectors, an independent scalar reading, frozen bits, statistics."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch

from solrl_ray.records import Address
from solrl_ray.sampling import noise

ADDRESS = Address(run_seed=42, purpose="initial-noise", iteration=3, prompt_id="9f86d081884c7d65", index=17, step=2)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_reproduces_the_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    arrays = [np.array([word], dtype=np.uint64) for word in counter + key]
    found = noise.philox4x32(arrays[:4], arrays[4:])
    assert tuple(int(word[0]) for word in found) == words


def scalar_words(address: Address, count: int) -> list[int]:
    """The documented construction, read again in plain Python integers."""
    fields = [address.run_seed, address.purpose, address.iteration, address.prompt_id]
    fields += [address.index, address.step]
    encoded = b"".join(b"%d:%s," % (len(str(f).encode()), str(f).encode()) for f in fields)
    digest = hashlib.blake2b(encoded, digest_size=16, person=b"solrl_ray.noise").digest()
    key_low, key_high, upper_low, upper_high = np.frombuffer(digest, dtype="<u4").tolist()
    words: list[int] = []
    for block in range(-(-count // 4)):
        counter = [block, 0, upper_low, upper_high]
        key = [key_low, key_high]
        for _ in range(10):
            high_0, low_0 = divmod(0xD2511F53 * counter[0], 2**32)
            high_1, low_1 = divmod(0xCD9E8D57 * counter[2], 2**32)
            counter = [high_1 ^ counter[1] ^ key[0], low_1, high_0 ^ counter[3] ^ key[1], low_0]
            key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
        words += counter
    return words[:count]


def test_normals_equal_a_scalar_reading_of_the_documented_construction() -> None:
    words = scalar_words(ADDRESS, 3 * 5 * 7)
    expected = np.array([NormalDist().inv_cdf((word + 0.5) / 2**32) for word in words])
    found = noise.standard_normal(ADDRESS, (3, 5, 7))
    assert found.dtype == np.float32
    # Both are AS241; only their logarithms differ, so at most the rounding to float32 can.
    np.testing.assert_allclose(found.ravel(), expected, rtol=2**-23, atol=0)


def test_uniform_numbers_are_52_bits_and_a_half() -> None:
    words = scalar_words(ADDRESS, 12)
    expected = [(((low | high << 32) >> 12) + 0.5) / 2**52 for low, high in zip(words[::2], words[1::2], strict=True)]
    assert noise.uniform(ADDRESS, (2, 3)).ravel().tolist() == expected


def test_a_permutation_is_the_sorting_order_of_addressed_integers() -> None:
    words = scalar_words(ADDRESS, 20)
    keys = [low | high << 32 for low, high in zip(words[::2], words[1::2], strict=True)]
    found = noise.permutation(ADDRESS, 10)
    assert found.dtype == np.int64
    assert found.tolist() == sorted(range(10), key=lambda i: keys[i])


def test_the_bits_are_frozen() -> None:
    """A change here changes every run that was ever recorded."""
    normals = noise.standard_normal(ADDRESS, (8,))
    assert [float(value).hex() for value in normals] == FROZEN_NORMALS
    assert [value.hex() for value in noise.uniform(ADDRESS, (3,)).tolist()] == FROZEN_UNIFORM
    assert noise.permutation(ADDRESS, 10).tolist() == FROZEN_PERMUTATION
    many = noise.standard_normal(ADDRESS, (1 << 18,))
    assert hashlib.sha256(many.astype("<f4").tobytes()).hexdigest() == FROZEN_DIGEST


FROZEN_NORMALS = [
    "0x1.1299b60000000p-1",
    "0x1.4e60100000000p+1",
    "0x1.eb23180000000p-1",
    "-0x1.47ca720000000p-1",
    "0x1.cef00c0000000p-1",
    "0x1.b9a1420000000p+0",
    "-0x1.9c8a120000000p-6",
    "0x1.8bdff00000000p-2",
]
FROZEN_UNIFORM = ["0x1.fdb29c8568845p-1", "0x1.0b47c4bf533c2p-2", "0x1.ea5dc97fa2543p-1"]
FROZEN_PERMUTATION = [1, 5, 9, 4, 8, 3, 7, 6, 2, 0]
FROZEN_DIGEST = "5d3b8958cae02b9c90dd46963324eb12af7339c0ccf2af819db22ba691c8dacf"


def test_the_quantile_inverts_the_distribution_function() -> None:
    words = np.concatenate([np.arange(2000), 2**32 - 1 - np.arange(2000), np.arange(0, 2**32, 2**20 + 7)])
    u = (words + 0.5) / 2**32
    z = noise.normal_quantile(u)
    lower = [0.5 * math.erfc(-value / math.sqrt(2)) for value in z.tolist()]
    np.testing.assert_allclose(lower, u, rtol=1e-13)
    reference = [NormalDist().inv_cdf(value) for value in u.tolist()]
    np.testing.assert_allclose(z, reference, rtol=2e-15, atol=0)


@pytest.mark.parametrize(
    "other",
    [
        replace(ADDRESS, run_seed=43),
        replace(ADDRESS, purpose="training-noise"),
        replace(ADDRESS, iteration=4),
        replace(ADDRESS, prompt_id="9f86d081884c7d66"),
        replace(ADDRESS, index=18),
        replace(ADDRESS, step=3),
        # The same digits, cut elsewhere: fields must not run into one another.
        replace(ADDRESS, index=1, step=72),
    ],
)
def test_every_field_of_the_address_names_another_stream(other: Address) -> None:
    ours, theirs = noise.standard_normal(ADDRESS, (4096,)), noise.standard_normal(other, (4096,))
    assert np.intersect1d(ours, theirs).size < 40
    assert abs(np.corrcoef(ours, theirs)[0, 1]) < 4 / math.sqrt(4096)


def test_a_batch_is_its_rows_one_by_one() -> None:
    addresses = [replace(ADDRESS, index=index) for index in range(5)]
    batch = noise.initial_noise(addresses, (6, 3))
    assert batch.shape == (5, 6, 3)
    assert batch.dtype == torch.float32
    for row, address in zip(batch, addresses, strict=True):
        np.testing.assert_array_equal(row.numpy(), noise.standard_normal(address, (6, 3)))

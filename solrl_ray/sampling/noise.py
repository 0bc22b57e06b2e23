"""Random numbers as pure functions of an address (design law 2).

``torch.randn`` promises nothing across devices or versions. Here every step is fixed, so equal addresses give equal
bits in every process, on every machine, with every library version:

1. **Address → key.** The six fields of `Address`, in the order of the dataclass, are written as netstrings
   (``<length>:<UTF-8 text>,``, integers in decimal) and hashed with BLAKE2b-128, personalised with
   ``solrl_ray.noise``. The digest is read as four little-endian 32-bit words: words 0 and 1 are the Philox
   key, words 2 and 3 the upper half of its counter. The lower half counts blocks from 0, so one address has
   2**64 blocks of four words.
2. **Key → words.** Philox4x32-10 (Salmon et al., *Parallel Random Numbers: As Easy as 1, 2, 3*, SC11).
   Word ``4 b + j`` of a stream is output ``j`` of block ``b``; a shaped array is filled in C order.
3. **Word → normal.** ``u = (word + 1/2) / 2**32`` is exact and symmetric about 1/2. It is mapped by the inverse
   normal distribution function AS241 PPND16 (Wichura, *Applied Statistics* 37, 1988; relative error 1e-16), in
   float64, and rounded once to float32. Only IEEE-exact operations are used (``+ - * /``, square root,
   ``frexp``). The logarithm is a series of our own, because libm's differs in the last bit between platforms.

Each normal uses one 32-bit word, which limits range and resolution:

- Values reach ±6.34; the mass beyond is 2**-32, one number in four billion.
- Neighbouring values are 6e-10 apart near 0, 5e-8 at ±3 sigma (finer than float32 at that value), 1.6e-4 at ±5 sigma
  and 0.17 at the ends.
- Two of n numbers share a word with probability n**2 / 2**33, which does not matter for noise.

Not Box-Muller: it needs a logarithm and a cosine, which differ in the last bit between libraries. Not Ziggurat: it
rejects words, so its numbers have no fixed addresses.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from solrl_ray.records import Address

if TYPE_CHECKING:  # importing torch takes seconds, and drawing numbers does not need it
    import torch

Words: TypeAlias = NDArray[np.uint64]
"""Unsigned 32-bit values held in uint64, so that a product of two of them is exact."""

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW_32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

_LN_2 = 0.6931471805599453
_ATANH_TERMS = tuple(1.0 / (2 * k + 1) for k in range(12))

# AS241 PPND16: coefficients of falling powers. The centre is a function of 0.180625 - (u - 1/2)**2, the tail a function
# of sqrt(-log(min(u, 1 - u))) - 1.6. AS241's third piece, for min(u, 1 - u) < 1.4e-11, is never needed: the smallest u
# of a 32-bit word is 2**-33 = 1.2e-10.
# fmt: off
_CENTRE_NUMERATOR = (
    2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
    1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0,
)
_CENTRE_DENOMINATOR = (
    5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
    5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0,
)
_TAIL_NUMERATOR = (
    7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
    3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0,
)
_TAIL_DENOMINATOR = (
    1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
    6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0,
)
# fmt: on


def standard_normal(address: Address, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Independent standard normals, float32 `shape`."""
    return _normals([address], math.prod(shape)).reshape(shape)


def initial_noise(addresses: Sequence[Address], shape: tuple[int, ...]) -> torch.Tensor:
    """One standard normal latent per address: float32 [len(addresses), *shape], on the CPU.

    Row i depends only on ``addresses[i]`` and equals ``standard_normal(addresses[i], shape)``.
    """
    import torch

    rows = _normals(addresses, math.prod(shape))
    return torch.from_numpy(rows.reshape(len(addresses), *shape))


def uniform(address: Address, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Independent uniform numbers in (0, 1), float64 `shape`; multiples of 2**-53, symmetric about 1/2."""
    # 52 bits plus the half take 53 bits, which float64 holds exactly, so neither 0 nor 1 can occur.
    integers = _integers_64(address, math.prod(shape)) >> np.uint64(12)
    return ((integers.astype(np.float64) + 0.5) * 2.0**-52).reshape(shape)


def permutation(address: Address, n: int) -> NDArray[np.int64]:
    """A permutation of 0 … n-1, int64 [n], each with the same probability up to n**2 / 2**65.

    The permutation sorts n addressed 64-bit integers; equal integers keep their order.
    """
    return np.argsort(_integers_64(address, n), kind="stable").astype(np.int64)


def philox4x32(counter: Sequence[Words], key: Sequence[Words]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10: four 32-bit words per counter, elementwise over arrays that broadcast.

    Args:
        counter: four arrays of 32-bit values, least significant word first.
        key: two arrays of 32-bit values.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product_1 >> _32) ^ c1 ^ k0,
            product_1 & _LOW_32,
            (product_0 >> _32) ^ c3 ^ k1,
            product_0 & _LOW_32,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW_32, (k1 + _WEYL[1]) & _LOW_32
    return c0, c1, c2, c3


def normal_quantile(u: NDArray[np.float64]) -> NDArray[np.float64]:
    """Inverse of the standard normal distribution function, float64, elementwise, bit-reproducible.

    Source: AS241 PPND16. Valid for 2**-33 <= u <= 1 - 2**-33, where the relative error is about 1e-16.
    """
    q = u - 0.5
    r = 0.180625 - q * q
    z: NDArray[np.float64] = q * _horner(_CENTRE_NUMERATOR, r) / _horner(_CENTRE_DENOMINATOR, r)
    tail = np.abs(q) > 0.425
    p = u[tail]
    r = np.sqrt(-_log(np.minimum(p, 1.0 - p))) - 1.6
    z[tail] = np.copysign(_horner(_TAIL_NUMERATOR, r) / _horner(_TAIL_DENOMINATOR, r), p - 0.5)
    return z


def _normals(addresses: Sequence[Address], count: int) -> NDArray[np.float32]:
    u = (_words(addresses, count).astype(np.float64) + 0.5) * 2.0**-32
    return normal_quantile(u).astype(np.float32)


def _integers_64(address: Address, count: int) -> NDArray[np.uint64]:
    """`count` 64-bit integers, each made of two words, the low word first."""
    words = _words([address], 2 * count)[0]
    return words[0::2] | (words[1::2] << _32)


def _words(addresses: Sequence[Address], count: int) -> Words:
    """The first `count` words of each address's stream: [len(addresses), count]."""
    streams = np.array([_stream(address) for address in addresses], dtype=np.uint64).reshape(-1, 4, 1)
    blocks = -(-count // 4)
    block = np.arange(blocks, dtype=np.uint64)[None, :]
    counter = (block & _LOW_32, block >> _32, streams[:, 2], streams[:, 3])
    words = np.stack(philox4x32(counter, (streams[:, 0], streams[:, 1])), axis=-1)
    return words.reshape(len(addresses), 4 * blocks)[:, :count]


def _stream(address: Address) -> tuple[int, ...]:
    """Four 32-bit words that start the address's stream: Philox key, then upper half of the counter."""
    texts = [str(value).encode() for value in astuple(address)]
    encoded = b"".join(b"%d:%s," % (len(text), text) for text in texts)
    # A constant, not this module's name: every number depends on it, so it must not change.
    digest = hashlib.blake2b(encoded, digest_size=16, person=b"solrl_ray.noise").digest()
    return tuple(int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4))


def _horner(coefficients: tuple[float, ...], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The polynomial with these coefficients of falling powers, at x."""
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def _log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of positive normal numbers, computed with exact operations only.

    With x = m 2**e and m in [sqrt(1/2), sqrt(2)): log x = e ln 2 + 2 atanh(s), s = (m - 1) / (m + 1). Since
    s**2 < 0.0295, twelve terms of the atanh series leave a relative error below 1e-19.
    """
    m, e = np.frexp(x)
    below = m < 0.7071067811865476
    m = np.where(below, 2.0 * m, m)
    s = (m - 1.0) / (m + 1.0)
    atanh = s * _horner(_ATANH_TERMS[::-1], s * s)
    return (e - below) * _LN_2 + 2.0 * atanh

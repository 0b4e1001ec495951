"""The order of samples, computed instead of stored: a keyed bijection on ``[0, size)``.

Owns the arithmetic that turns a stream position into a sample index, and the split of
samples into training and held out. Must not know datasets, files or ranks: the same
numbers must come out on every machine, world size and numpy version, so everything here
is 64-bit integer arithmetic and no library generator is used.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MAX_SIZE = 2**48
# Counts as one more epoch: keeps the evaluation order apart from every training epoch.
EVAL_EPOCH = (1 << 62) - 1

_ROUNDS = 6
_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_SPLIT = 0x5851F42D4C957F2D

Words = npt.NDArray[np.uint64]


def permute(positions: npt.NDArray[np.int64], *, size: int, key: int) -> npt.NDArray[np.int64]:
    """Map positions to sample indices: a bijection on ``[0, size)`` chosen by ``key``.

    A Feistel network over the smallest power of two that holds ``size``, with cycle
    walking (Black and Rogaway, 2002): a value outside the range is encrypted again.

    Args:
        positions: int64, any shape, each in ``[0, size)``.
        size: number of samples, 1 to 2**48.
        key: any integer; its low 64 bits count. See :func:`epoch_key`.

    Returns:
        int64, the shape of ``positions``.

    Raises:
        ValueError: ``size`` or a position is out of range.
    """
    inputs = np.asarray(positions, dtype=np.int64)
    _check_range(inputs, size)
    values = inputs.reshape(-1).astype(np.uint64)
    bits = (size - 1).bit_length()
    keys = _round_keys(key)
    values = _encrypt(values, bits=bits, keys=keys)
    outside = np.flatnonzero(values >= np.uint64(size))
    while outside.size:
        walked = _encrypt(values[outside], bits=bits, keys=keys)
        values[outside] = walked
        outside = outside[walked >= np.uint64(size)]
    return values.astype(np.int64).reshape(inputs.shape)


def epoch_key(seed: int, epoch: int) -> int:
    """Key of one epoch's order, in ``[0, 2**64)``."""
    return _mix_int(_mix_int(seed + _GOLDEN) + epoch * _GOLDEN)


def held_out(
    indices: npt.NDArray[np.int64], *, share: float, seed: int = 0
) -> npt.NDArray[np.bool_]:
    """True for the sample indices that are kept out of training.

    Depends on the index alone, so the split survives a change of the run's seed, of the
    epoch and of the world size; ``seed`` is for a second, unrelated split.

    Args:
        indices: int64, any shape, not negative.
        share: part held out, 0 (none) to 1 (all).
        seed: which split.

    Returns:
        bool, the shape of ``indices``.
    """
    inputs = np.asarray(indices, dtype=np.int64)
    base = np.uint64(_mix_int(seed ^ _SPLIT))
    hashed = _mix(inputs.reshape(-1).astype(np.uint64) + base)
    # 53 bits are exact in a float64, so share 0 and share 1 mean none and all.
    fraction = (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    below: npt.NDArray[np.bool_] = fraction < share
    return below.reshape(inputs.shape)


def _check_range(positions: npt.NDArray[np.int64], size: int) -> None:
    if not 1 <= size <= MAX_SIZE:
        raise ValueError(f"size {size} is not in 1..2**48")
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < size:
        raise ValueError(
            f"positions {int(positions.min())}..{int(positions.max())} are not in 0..{size - 1}"
        )


def _encrypt(values: Words, *, bits: int, keys: list[int]) -> Words:
    """One pass of the network over ``[0, 2**bits)``; halves may differ by one bit.

    Each round changes one half by a function of the other, which is undone by doing it
    again: a bijection whatever the round function is and however wide the halves are.
    """
    low_bits = bits - bits // 2
    low_mask, high_mask = np.uint64(2**low_bits - 1), np.uint64(2 ** (bits // 2) - 1)
    low, high = values & low_mask, values >> np.uint64(low_bits)
    for number, key in enumerate(keys):
        if number % 2:
            high = high ^ (_mix(low + np.uint64(key)) & high_mask)
        else:
            low = low ^ (_mix(high + np.uint64(key)) & low_mask)
    return (high << np.uint64(low_bits)) | low


def _round_keys(key: int) -> list[int]:
    return [_mix_int(key + (number + 1) * _GOLDEN) for number in range(_ROUNDS)]


def _mix(words: Words) -> Words:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014); arrays wrap modulo 2**64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX_2)
    return words ^ (words >> np.uint64(31))


def _mix_int(word: int) -> int:
    """The same finaliser for one Python integer: numpy scalars would warn on wrapping."""
    return int(_mix(np.array([word & _WORD], dtype=np.uint64))[0])

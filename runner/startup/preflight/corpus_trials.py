"""Tests the data: ids and labels, odd windows, repeats, held-out text in the training set."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from runner.data.dataset import NOT_COUNTED, Dataset, RecordDataset, Sample, Tokens, describe
from runner.data.draws import read_sample
from runner.startup.checks import Check, not_tried
from runner.startup.preflight.independence import labels_belong

Words = NDArray[np.uint64]

_SAMPLES = 10_000
_SECONDS = 6.0  # time limit for reading, in each of the two passes
_NAMED = 3
_REPEATS, _LONGEST = 32, 13  # OLMo 2 drops documents with this many repeats of 1 to 13 tokens
_FEW = 0.3  # share of the usual entropy
_CHUNK = 50  # tokens; chance does not repeat so many
_DISTINCT = 10  # different tokens in a chunk: fewer say little
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it has an inverse modulo 2**64
_SHARE, _MANY = 0.01, 0.1
_UNCOUNTED = 0.95
# What labels may be: the token so many places ahead, its id so much above, and what is wrong then.
_LABELS = (
    (0, 0, ""),
    (1, 0, "are token n + 1: labels are shifted already, and the run shifts them again"),
    (2, 0, "are token n + 2: labels are two tokens ahead"),
    (0, 1, "are one above: their ids, or those of the inputs, are off by one"),
    (0, -1, "are one below: their ids, or those of the inputs, are off by one"),
)
_PIECE, _PLACES = 8, 32  # tokens that name a sample, and places where they are looked for


@dataclass(frozen=True, kw_only=True)
class TrialCorpus:
    """The data as the run reads it.

    Args:
        training, held_out: int64 indices into the data set, in an order spread over all of it.
        held_out_from: the data set that ``held_out`` indexes.
    """

    dataset: Dataset
    held_out_from: Dataset
    training: NDArray[np.int64]
    held_out: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Read:
    index: int
    tokens: Tokens
    labels: Tokens


def corpus_checks(corpus: TrialCorpus) -> Iterator[Check]:
    """Run all trials that need only samples."""
    began = time.monotonic()
    if isinstance(corpus.dataset, RecordDataset):
        yield labels_belong(corpus.dataset, corpus.training.tolist())
    read, unreadable = _samples(corpus.dataset, corpus.training[:_SAMPLES], began + _SECONDS)
    if not read:
        yield not_tried("the data", "its samples hold no token ids, or none can be read")
        return
    yield _ids(corpus.dataset, read, unreadable)
    yield _counted(corpus.dataset, read)
    yield _follows(read)
    yield _odd(corpus.dataset, read)
    yield _duplicates(corpus.dataset, read)
    yield _contamination(corpus)


def _samples(
    dataset: Dataset, indices: NDArray[np.int64], until: float
) -> tuple[list[_Read], list[int]]:
    samples: list[_Read] = []
    unreadable: list[int] = []
    for index in indices.tolist():
        try:
            sample = read_sample(dataset, index)
        except Exception:  # from a user's data set; a run leaves such samples out
            unreadable.append(index)
            continue
        if not isinstance(sample, Sample):
            return [], []
        labels = sample.tokens if sample.labels is None else sample.labels
        samples.append(_Read(index=index, tokens=sample.tokens, labels=labels))
        if time.monotonic() > until:
            break
    return samples, unreadable


def _named(dataset: Dataset, indices: Sequence[int]) -> str:
    names = "; ".join(describe(dataset, index) for index in indices[:_NAMED])
    more = f"; and {len(indices) - _NAMED} more" if len(indices) > _NAMED else ""
    return f"{names}{more}"


def _some(dataset: Dataset, indices: Sequence[int], what: str) -> str:
    """A further part of a sentence; empty if there are none."""
    return f"; {len(indices)} {what}: {_named(dataset, indices)}" if indices else ""


def _ids(dataset: Dataset, read: Sequence[_Read], unreadable: Sequence[int]) -> Check:
    vocabulary = dataset.vocab_size
    wrong = [
        one.index
        for one in read
        if one.tokens.min() < 0
        or one.tokens.max() >= vocabulary
        or ((one.labels != NOT_COUNTED) & ((one.labels < 0) | (one.labels >= vocabulary))).any()
    ]
    largest = max(int(one.tokens.max()) for one in read)
    return Check(
        name="ids and labels are in the vocabulary",
        holds=not wrong and not unreadable,
        found=f"{len(read)} samples: ids up to {largest} of {vocabulary}"
        + _some(dataset, unreadable, "cannot be read")
        + _some(dataset, wrong, "have ids outside"),
        remedy="another tokenizer than the vocabulary's, or damaged files",
        is_warning=not wrong,
    )


def _counted(dataset: Dataset, read: Sequence[_Read]) -> Check:
    shares = np.array([(one.labels[1:] != NOT_COUNTED).mean() for one in read])
    empty = [one.index for one, share in zip(read, shares, strict=True) if share == 0]
    is_enough = bool(shares.mean() > 1 - _UNCOUNTED)
    return Check(
        name="labels count",
        holds=is_enough and len(empty) <= _SHARE * len(read),
        found=f"of the labels {100 * shares.mean():.3g} % count"
        + _some(dataset, empty, "samples count nothing"),
        remedy="see what masks them: a chat template without its assistant's marks, padding",
        is_warning=is_enough,
    )


def _follows(read: Sequence[_Read]) -> Check:
    """Whether labels equal their tokens: the run shifts them by one itself."""
    hits = np.zeros(len(_LABELS))
    total = 0
    for one in read[:1000]:
        counted = one.labels != NOT_COUNTED
        total += int(counted.sum())
        for case, (ahead, above, _) in enumerate(_LABELS):
            end = len(one.labels) - ahead
            hits[case] += ((one.labels[:end] == one.tokens[ahead:] + above) & counted[:end]).sum()
    share = hits / max(total, 1)
    best = int(np.argmax(share))
    message = (
        f"{100 * share[0]:.3g} % of the labels are their own token, which the run shifts by one"
    )
    wrong = ""
    if best > 0 and share[best] > 0.9:
        wrong = f"; {100 * share[best]:.3g} % {_LABELS[best][2]}"
    elif share[0] <= 0.9 and (others := _of_others(read)) > _MANY:
        wrong = f"; of {100 * others:.3g} % of the samples they are the tokens of another sample: "
        wrong += "labels were shuffled alone"
    return Check(
        name="labels are the tokens",
        holds=bool(share[0] > 0.9),
        found=message + wrong,
        remedy="labels[i] belongs to input_ids[i]; leave labels out where every token counts",
        is_warning=not wrong,
    )


def _of_others(read: Sequence[_Read]) -> float:
    """The share of samples whose first counted labels another sample has as its tokens there."""
    wanted: dict[tuple[int, bytes], int] = {}
    for one in read:
        place = int(np.argmax(one.labels != NOT_COUNTED))
        piece = one.labels[place : place + _PIECE]
        if (piece != NOT_COUNTED).all() and not np.array_equal(
            piece, one.tokens[place : place + _PIECE]
        ):
            key = place, piece.astype(np.int64).tobytes()
            wanted[key] = wanted.get(key, 0) + 1
    places = sorted({place for place, _ in wanted})[:_PLACES]
    found = {
        (place, one.tokens[place : place + _PIECE].astype(np.int64).tobytes())
        for one in read
        for place in places
    }
    return sum(count for key, count in wanted.items() if key in found) / len(read)


def _odd(dataset: Dataset, read: Sequence[_Read]) -> Check:
    """Find windows with few different tokens, or that repeat one piece."""
    entropies = np.array([_entropy(one.tokens) for one in read])
    usual = float(np.median(entropies))
    repeats = np.array([_longest_repeat(one.tokens) for one in read])
    odd = np.flatnonzero((entropies < _FEW * usual) | (repeats >= _REPEATS))
    low, middle, high = np.quantile(entropies, [0.01, 0.5, 0.99])
    worst = [read[at].index for at in odd[np.argsort(entropies[odd])].tolist()]
    return Check(
        name="text is not degenerate",
        holds=len(odd) <= _SHARE * len(read),
        found=f"entropy of a window's tokens {low:.2g} / {middle:.3g} / {high:.3g} nats "
        f"(1, 50, 99 %), a piece repeated up to {int(repeats.max())} times"
        + _some(dataset, worst, "odd"),
        remedy="leave documents out that repeat themselves (OLMo 2: 32 repeats of 1 to 13 tokens)",
        is_warning=len(odd) <= _MANY * len(read),
    )


def _entropy(tokens: Tokens) -> float:
    counts = np.unique(tokens, return_counts=True)[1]
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum())


def _longest_repeat(tokens: Tokens) -> int:
    """The largest number of immediate repeats of a piece of 1 to 13 tokens."""
    most = 1
    for size in range(1, min(_LONGEST, len(tokens) // 2) + 1):
        same = tokens[size:] == tokens[:-size]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], same, [0]])))
        if len(edges):
            most = max(most, 1 + int((edges[1::2] - edges[::2]).max()) // size)
    return most


def _duplicates(dataset: Dataset, read: Sequence[_Read]) -> Check:
    seen: dict[bytes, int] = {}
    twice = [o.index for o in read if seen.setdefault(o.tokens.tobytes(), o.index) != o.index]
    message = f"{len(twice)} of {len(read)} windows occur twice"
    return Check(
        name="training windows differ",
        holds=len(twice) <= _SHARE * len(read),
        found=message + (f": {_named(dataset, twice)}" if twice else ""),
        remedy="remove duplicate documents",
        is_warning=len(twice) <= _MANY * len(read),
    )


def _contamination(corpus: TrialCorpus) -> Check:
    """Find pieces of held-out text anywhere in the training data."""
    name = "held-out text is not trained on"
    if not len(corpus.held_out):
        return not_tried(name, "nothing is held out")
    held, _ = _samples(corpus.held_out_from, corpus.held_out[:2000], time.monotonic() + _SECONDS)
    if not held:
        return not_tried(name, "held-out samples hold no token ids")
    chunk = min(_CHUNK, len(held[0].tokens) - 1)
    pieces = [_rich_pieces(one.tokens, chunk) for one in held]
    known = np.unique(np.concatenate(pieces))
    if not len(known):
        return not_tried(name, f"its pieces of {chunk} tokens have fewer than {_DISTINCT} kinds")
    number_sets = [known[:0]]
    until = time.monotonic() + _SECONDS
    num_read = 0
    for index in corpus.training.tolist():
        read, _ = _samples(corpus.dataset, np.array([index]), until)
        num_read += 1
        for one in read:
            numbers = _numbers(one.tokens, chunk)
            number_sets.append(numbers[np.isin(numbers, known)])
        if time.monotonic() > until:
            break
    seen = np.unique(np.concatenate(number_sets))
    places = [
        one.index for one, numbers in zip(held, pieces, strict=True) if np.isin(numbers, seen).any()
    ]
    share = len(seen) / len(known)
    return Check(
        name=name,
        holds=share <= _SHARE,
        found=f"{100 * share:.2g} % of {len(known)} pieces of {chunk} tokens are found in "
        f"{num_read} of {len(corpus.training)} training windows"
        + (f": {_named(corpus.held_out_from, places)}" if places else ""),
        remedy="hold out whole documents of another origin (data.val_path), and remove duplicates "
        "before the split",
        is_warning=share < (_MANY if chunk == _CHUNK else 0.5),
    )


def _rich_pieces(tokens: Tokens, size: int) -> Words:
    """Hashes of a window's consecutive pieces that have enough different tokens."""
    numbers = _numbers(tokens, size)[::size]
    if not len(numbers):
        return numbers
    rows = np.sort(tokens[: len(numbers) * size].reshape(-1, size), axis=1)
    kinds = 1 + (rows[:, 1:] != rows[:, :-1]).sum(axis=1)
    rich: Words = numbers[kinds >= min(_DISTINCT, size // 2)]
    return rich


def _numbers(tokens: Tokens, size: int) -> Words:
    """A uint64 hash of each piece of ``size`` tokens, by its start.

    A polynomial modulo 2**64: equal pieces have equal hashes, others hardly ever.
    """
    if len(tokens) < size or size < 2:
        return np.zeros(0, dtype=np.uint64)
    powers = _powers(len(tokens) + 1)
    with np.errstate(over="ignore"):
        weighted = (tokens.astype(np.uint64) + np.uint64(1)) * powers[: len(tokens)]
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(weighted, dtype=np.uint64)])
        # Times the missing power of the base, so that the place does not matter.
        numbers: Words = (sums[size:] - sums[:-size]) * powers[len(tokens) - size :: -1]
    return numbers


@cache
def _powers(number: int) -> Words:
    powers = np.full(number, _BASE, dtype=np.uint64)
    powers[0] = 1
    with np.errstate(over="ignore"):
        return np.cumprod(powers, dtype=np.uint64)

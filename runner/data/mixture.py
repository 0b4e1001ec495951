"""Several sources as one stream of samples: which source is at a position, and which of its
samples.

Positions form blocks. Within a block each source has its share of the places, rounded,
and a keyed permutation of the block (a hash of the position) says which places. A source's samples
are taken one after the other, each epoch in its own order. So the sample at a position follows
from the position, the seed and the weights alone.

Weights may change from a position on: a :class:`Phase`. Sources go on where the phase before
left them, so no sample is repeated or left out. Must not know ranks or files.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from runner.data.cursor import Indices, OneSource, epoch_key, permute
from runner.data.dataset import Dataset, Record, RecordDataset, Sample, cumulative, digest
from runner.data.dataset import sampled_files as sampled_files_of
from runner.data.draws import draws
from runner.system.error import DataError

BLOCK: Final = 4096
_BLOCKS_KEPT: Final = 16
_WEIGHT_UNITS: Final = 1 << 40  # parts of the largest weight: proportions are whole numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """From position ``start`` on samples come from the sources by ``weights``: name to weight."""

    start: int
    weights: Mapping[str, float]


class MixtureOrder:
    """The order of samples of several sources; indices count through them in the order given.

    Args:
        lengths: samples of each source by name.
        seed: of the order.
        held_out_share: share of each source never trained on, chosen by hash.
        weights: of the sources, from position 0 on until :meth:`load` says otherwise.

    Raises:
        DataError: nothing is left to train on in a source that is read.
    """

    def __init__(
        self,
        lengths: Mapping[str, int],
        *,
        seed: int,
        held_out_share: float,
        weights: Mapping[str, float],
    ) -> None:
        self.names = tuple(lengths)
        self.wanted = dict(weights)
        self._offsets = cumulative([lengths[name] for name in self.names])
        self._seed = seed
        self._sources = [
            OneSource(
                num_samples=lengths[name],
                seed=seed ^ _name_hash(name),
                held_out_share=held_out_share,
                split=_name_hash(name),
            )
            for name in self.names
        ]
        self._phases: list[Phase] = []
        self._before: list[list[int]] = []  # what each source has given when a phase begins
        self._block = lru_cache(_BLOCKS_KEPT)(self._made_block)
        self.load([Phase(start=0, weights=weights)])
        for name, source in zip(self.names, self._sources, strict=True):
            if weights.get(name):
                source.require_some(f" of data.sources {name!r}")

    def load(self, phases: Sequence[Phase]) -> None:
        """Set the phases, the first from position 0 on, each later one from its start on."""
        self._phases, self._before = [], []
        for phase in phases:
            # A phase that begins where another does, or before it, replaces it.
            while self._phases and self._phases[-1].start >= phase.start:
                del self._phases[-1], self._before[-1]
            self._block.cache_clear()  # a replaced phase may have given some under this number
            self._before.append(self._given(phase.start))
            self._phases.append(phase)

    def indices(self, positions: Indices) -> Indices:
        """Data set indices of stream positions, int64, same shape."""
        sources, ranks = self._located(positions)
        sample_indices = np.empty_like(positions)
        for source in np.unique(sources):
            chosen = sources == source
            own = self._sources[source].indices(ranks[chosen])
            sample_indices[chosen] = self._offsets[source] + own
        return sample_indices

    def sources(self, indices: Indices) -> Indices:
        """The number of the source of each data set index, int64."""
        return np.searchsorted(self._offsets, indices, side="right").astype(np.int64) - 1

    def is_held_out(self, indices: Indices) -> npt.NDArray[np.bool_]:
        """Which data set indices are not trained on."""
        sources = self.sources(indices)
        mask = np.zeros(indices.shape, dtype=np.bool_)
        for source in np.unique(sources):
            chosen = sources == source
            mask[chosen] = self._sources[source].is_held_out(
                indices[chosen] - self._offsets[source]
            )
        return mask

    def held_out_indices(self, count: int) -> Indices:
        """A fixed set of held-out samples: up to ``count`` of each source, int64."""
        return np.concatenate([self._held_out_of(n, count) for n in range(len(self.names))])

    def held_out_like(self, count: int, position: int) -> Indices:
        """About ``count`` held-out samples in the proportions of ``position``, int64.

        Of each source that is read at least one, spread evenly, so that every rank gets a mixture.
        """
        phase = sum(begun.start <= position for begun in self._phases) - 1
        shares = self._shares(max(phase, 0))
        places, parts = [np.empty(0)], [np.empty(0, dtype=np.int64)]
        for source, number in enumerate(split(count, shares)):
            number = max(number, 1) if shares[source] else 0
            own = self._held_out_of(source, number) if number else parts[0]
            if len(own):
                parts.append(np.resize(own, number))
                places.append((np.arange(number) + 0.5) / number)
        spread_evenly: Indices = np.argsort(np.concatenate(places), kind="stable")
        return np.concatenate(parts)[spread_evenly]

    def _located(self, positions: Indices) -> tuple[Indices, Indices]:
        starts = np.array([phase.start for phase in self._phases], dtype=np.int64)
        phases = np.searchsorted(starts, positions, side="right") - 1
        blocks, places = np.divmod(positions - starts[phases], BLOCK)
        sources, ranks = np.empty_like(positions), np.empty_like(positions)
        for phase, number in {*zip(phases.tolist(), blocks.tolist(), strict=True)}:
            chosen = (phases == phase) & (blocks == number)
            of_block, ranks_in_block = self._block(phase, number)
            sources[chosen] = of_block[places[chosen]]
            ranks[chosen] = ranks_in_block[places[chosen]]
        return sources, ranks

    def _made_block(self, phase: int, number: int) -> tuple[Indices, Indices]:
        """The source at each place, and which of its samples, counted from 0; int64 [BLOCK]."""
        shares = self._shares(phase)
        first, last = split(number * BLOCK, shares), split((number + 1) * BLOCK, shares)
        counts = [stop - start for start, stop in zip(first, last, strict=True)]
        key = epoch_key(
            self._seed ^ _name_hash(f"block of phase {self._phases[phase].start}"), number
        )
        places = permute(np.arange(BLOCK, dtype=np.int64), size=BLOCK, key=key)
        sources = np.repeat(np.arange(len(counts), dtype=np.int64), counts)[places]
        ranks = np.empty(BLOCK, dtype=np.int64)
        for source, count in enumerate(counts):
            begin = self._before[phase][source] + first[source]
            ranks[sources == source] = np.arange(begin, begin + count)
        return sources, ranks

    def _shares(self, phase: int) -> list[int]:
        weights = self._phases[phase].weights
        largest = max(weights.values())
        return [
            max(1, round(weights[name] / largest * _WEIGHT_UNITS)) if weights.get(name) else 0
            for name in self.names
        ]

    def _given(self, position: int) -> list[int]:
        """How many samples of each source are before ``position``."""
        if not self._phases:
            return [0] * len(self.names)
        phase = len(self._phases) - 1
        blocks, places = divmod(position - self._phases[phase].start, BLOCK)
        given = split(blocks * BLOCK, self._shares(phase))
        sources, _ = self._block(phase, blocks)
        more = np.bincount(sources[:places], minlength=len(self.names)).tolist()
        return [sum(of) for of in zip(self._before[phase], given, more, strict=True)]

    def _held_out_of(self, source: int, count: int) -> Indices:
        return self._sources[source].held_out_indices(count) + int(self._offsets[source])


def split(total: int, shares: Sequence[int]) -> list[int]:
    """Split ``total`` by ``shares`` into whole numbers that add up to it.

    Each grows with ``total``, one of them by one at a time: what is left over by the sources before
    is cut by the share of what is left over.
    """
    rest, all_shares = total, sum(shares)
    parts = []
    for share in shares:
        parts.append(rest * share // all_shares if share else 0)
        rest -= parts[-1]
        all_shares -= share
    return parts


class Mixed:
    """Several data sets as one; see :class:`MixtureOrder` for the order of their samples.

    Of samples without tokens it is a :class:`RecordDataset`, and the first source collates them.
    """

    example: Record
    collate: Callable[[Sequence[Record]], dict[str, Any]]

    def __init__(self, sources: Mapping[str, Dataset]) -> None:
        self._names = tuple(sources)
        self._sources = tuple(sources.values())
        self._offsets = cumulative([len(source) for source in self._sources])
        self.vocab_size = max(source.vocab_size for source in self._sources)
        self.draws = any(map(draws, self._sources))
        self.sampled_files: tuple[tuple[str, Path], ...] = tuple(
            (f"{name}/{file}", path)
            for name, source in sources.items()
            for file, path in sampled_files_of(source)
        )
        first = self._sources[0]
        if isinstance(first, RecordDataset):
            self.example, self.collate = first.example, first.collate

    @property
    def lengths(self) -> dict[str, int]:
        """Samples of each source by name."""
        return {name: len(source) for name, source in self.items()}

    def items(self) -> list[tuple[str, Dataset]]:
        """The sources by name."""
        return list(zip(self._names, self._sources, strict=True))

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __getitem__(self, index: int) -> Sample | Record:
        source, local = self._where(index)
        return self._sources[source][local]

    def describe(self, index: int) -> str:
        source, local = self._where(index)
        return f"{self._names[source]}: {self._sources[source].describe(local)}"

    def fingerprint(self) -> str:
        """A digest of the sources' names and contents; weights do not matter."""
        return digest(sorted([name, source.fingerprint()] for name, source in self.items()))

    def _where(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not in 0..{len(self) - 1}")
        source = int(np.searchsorted(self._offsets, index, side="right")) - 1
        return source, int(index) - int(self._offsets[source])


def mix(sources: Mapping[str, Dataset]) -> Mixed:
    """
    Raises:
        DataError: some sources have tokens and some do not.
    """
    records = [name for name, source in sources.items() if isinstance(source, RecordDataset)]
    if records and len(records) < len(sources):
        raise DataError(
            f"data.sources: {', '.join(records)} give no token ids, and the others do; a batch "
            "holds samples of one kind"
        )
    return Mixed(sources)


def describe_phase(phase: Phase) -> str:
    """The shares of the samples, as "web 0.700, code 0.300"."""
    total = math.fsum(phase.weights.values())
    return ", ".join(f"{name} {weight / total:.3f}" for name, weight in phase.weights.items())


def _name_hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")

"""Adapts a data set of the user's own: :func:`adapt`.

Owns what it must offer (``len``, ``[i]``, optional ``collate``, ``describe``, ``fingerprint``,
``vocab_size``), the checks when it is opened and when a sample is read, and its
default fingerprint. Must not know the configuration but for the keys that messages name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from runner.data.dataset import (
    NOT_COUNTED,
    Dataset,
    Record,
    Sample,
    Tokens,
    digest,
    padded,
    require_ids,
    spread,
)
from runner.data.draws import Retries, generators, kept_while_drawing, seed_by_index
from runner.system.error import DataError

Fields = dict[str, torch.Tensor]

TOKEN_FIELDS: Final = frozenset({"input_ids", "labels", "attention_mask"})
_TRIED: Final = 8  # samples tried at the opening, to find a readable one
_REPEAT_SECONDS: Final = 5.0  # for reading samples twice at the opening
_MOST_LISTED, _MOST_LISTED_BYTES = 1 << 20, 2 << 30  # samples of an iterable that are kept
_SHOWN: Final = 300  # characters of a data set's error


class MapStyle(Protocol):
    """The minimum that a user's own data set must offer."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def adapt(
    dataset: Any,
    *,
    vocab_size: int | None,
    seq_len: int,
    name: str = "dataset",
    may_draw: bool = True,
    retry_seconds: float = 0.0,
) -> Dataset:
    """Make a Dataset of any object with ``__len__`` and ``__getitem__``.

    Samples of token ids are a :class:`Sample`, a sequence, an array or a tensor of 2 to
    ``seq_len + 1`` ids, or a mapping with ``input_ids`` and, optionally, ``labels`` (for each
    token: itself, or -100 where it does not count) and ``attention_mask`` (0: padding at the end).
    Shorter ones are padded, and the padding does not count.

    Any other mapping of numbers, arrays and tensors is a :class:`Record`: they are stacked, or go
    through the object's own ``collate`` (a list of samples -> tensors by name, each with the number
    of samples as first dimension), which may also make samples of token ids of any other thing.

    The object's own ``describe(index)``, ``fingerprint()`` and ``vocab_size`` are used where it has
    them; the default fingerprint covers the length and up to 64 samples, first and last among them.

    A tuple is a mapping by place ("0", "1", ...). An iterable is read once, to its end, and kept; a
    DataLoader gives its data set and its ``collate_fn``.

    Args:
        may_draw: whether samples may draw from torch's, NumPy's and Python's generators.
        retry_seconds: how long a sample that the system refuses is asked for again.

    Raises:
        DataError: the object is empty or not a map-style data set, none of its first samples can be
            read, or a sample differs when it is read again.
    """
    collate: Callable[[list[Any]], Any] | None = getattr(dataset, "collate", None)
    if isinstance(dataset, DataLoader):  # its order and batch size are the run's affair
        collate = None if dataset.collate_fn is default_collate else dataset.collate_fn
        dataset = dataset.dataset
    is_stream = isinstance(dataset, IterableDataset)
    if is_stream or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        dataset = _listed(dataset, name)
    own = _Own(dataset, name, may_draw=may_draw, retry_seconds=retry_seconds)
    with kept_while_drawing():
        item = own.first_readable()
        sample = item if collate is None else _only(collate([item]))
        if not _is_tokens(sample):
            size = vocab_size or int(getattr(dataset, "vocab_size", 0) or 0)
            adapted = AdaptedRecords(
                own, example=Record(item=item), vocab_size=size, collate=collate
            )
            adapted.collate([adapted.example, adapted.example])
            return adapted
    return Adapted(
        own,
        vocab_size=vocab_size or _vocab_size(dataset, name),
        seq_len=seq_len,
        each=None if collate is None else lambda sample: _only(collate([sample])),
    )


def _listed(stream: Any, name: str) -> list[Any]:
    """The samples of an iterable, read once to its end: from then on they have numbers.

    Raises:
        DataError: it is none, or too long to be kept in memory.
    """
    loop = (
        "or put runner.Guard into a loop of your own, where `for batch in guard.over(loader):` "
        "takes any iterable (docs/loop.md)"
    )
    if not isinstance(stream, Iterable):
        raise DataError(
            f"{name} gives {type(stream).__name__}, which lacks len() or [i], and cannot be "
            f"iterated either; a run reads samples by number: give a map-style data set, {loop}"
        )
    samples: list[Any] = []
    num_bytes = 0
    with kept_while_drawing():
        seed_by_index(0)
        for sample in stream:
            samples.append(sample)
            parts = sample.values() if isinstance(sample, Mapping) else sample
            if hasattr(parts, "nbytes") or not isinstance(parts, Iterable):
                parts = [parts]
            num_bytes += sum(getattr(part, "nbytes", 64) for part in parts)
            if len(samples) > _MOST_LISTED or num_bytes > _MOST_LISTED_BYTES:
                raise DataError(
                    f"{name} gives an iterable of more than {len(samples) - 1:,} samples or "
                    f"{_MOST_LISTED_BYTES >> 30} GiB: too many to be kept, and a run reads samples "
                    f"by number, so that it can skip and repeat them. Give len() and [i], {loop}"
                )
    return samples


class _Own:
    """The object as its owner gave it, its checks and its fingerprint."""

    def __init__(
        self, dataset: MapStyle, name: str, *, may_draw: bool, retry_seconds: float
    ) -> None:
        self.dataset = dataset
        self.name = name
        self.may_draw = may_draw
        self.size = _size(dataset, name)  # from now on, although a file may grow
        self._retries = Retries(retry_seconds)

    def item(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} is not in 0..{self.size - 1}")
        return self.dataset[int(index)]

    def describe(self, index: int) -> str:
        own = getattr(self.dataset, "describe", None)
        return str(own(int(index))) if own else f"{self.name} sample {index}"

    def first_readable(self) -> Any:
        """The first readable sample; unreadable ones are skipped later."""
        failures = []
        for index in range(min(_TRIED, self.size)):
            try:
                self._drawn(index)  # what is opened at the first reading may draw
                item = self._drawn(index)
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}"[:_SHOWN])
                continue
            self._require_same(index, contents(item))
            return item
        raise DataError(
            f"{self.name}: none of its first {len(failures)} samples can be read; sample 0: "
            f"{failures[0]}"
        )

    @cached_property
    def fingerprint(self) -> str:
        """The object's own, or one of its length and of samples spread over it.

        Raises:
            DataError: a sample differs when it is read again.
        """
        own = getattr(self.dataset, "fingerprint", None)
        with kept_while_drawing():
            sampled = self._of_samples() if own is None or self.may_draw else ""
            return sampled if own is None else str(own())

    def _of_samples(self) -> str:
        hashed = hashlib.sha256(f"{self.name} {self.size}".encode())
        until = time.monotonic() + _REPEAT_SECONDS
        num_kept = 0
        for index, _ in spread(self.size, block=1, whole=False):
            try:
                item_digest, after = contents(self._drawn(index)), generators()
            except Exception as error:  # it is skipped when its turn comes
                hashed.update(type(error).__name__.encode())
                continue
            hashed.update(item_digest)
            if self.may_draw and time.monotonic() < until:
                self._require_same(index, item_digest)
                num_kept += generators() != after
                if num_kept > 1:  # one may open a file, or import, at its first reading
                    raise DataError(
                        f"{self.name} sample {index} draws random numbers when it is first read "
                        "and not when it is read again: it is kept as it was drawn, so that a run "
                        "that is resumed sees others. Keep a sample as it is before it is augmented"
                    )
        return hashed.hexdigest()

    def _require_same(self, index: int, once: bytes) -> None:
        if contents(self._drawn(index)) == once:
            return
        raise DataError(
            f"{self.name} sample {index} differs when it is read again, although torch's, NumPy's "
            "and Python's generators are seeded alike for each reading: no step could be repeated "
            "and no run resumed exactly. Draw what is random from these three; a generator that "
            "the data set keeps (self.rng = np.random.default_rng(0)) goes on from sample to "
            "sample: make it in [i], as np.random.default_rng(np.random.randint(2**31))"
        )

    def _drawn(self, index: int) -> Any:
        def once() -> Any:
            seed_by_index(index)
            return self.dataset[index]

        return self._retries(once)


def _size(dataset: MapStyle, name: str) -> int:
    try:
        size = len(dataset)
    except Exception as error:
        raise DataError(f"{name}: len() fails with {type(error).__name__}: {error}") from None
    if size < 1:
        raise DataError(f"{name} has {size} samples; training needs at least 1")
    return size


class Adapted:
    """Samples of token ids. Build it with :func:`adapt`.

    Args:
        each: turns an item of the data set into token ids.
    """

    def __init__(
        self, own: _Own, *, vocab_size: int, seq_len: int, each: Callable[[Any], Any] | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.draws = own.may_draw
        self._own = own
        self._seq_len = seq_len
        self._each = each
        self.sampled_files = tuple(getattr(own.dataset, "sampled_files", ()))
        self.contents = "" if own.may_draw else str(getattr(own.dataset, "contents", ""))

    def __len__(self) -> int:
        return self._own.size

    def __getitem__(self, index: int) -> Sample:
        return padded(self.unpadded(index), self._seq_len)

    def unpadded(self, index: int) -> Sample:
        """A sample without padding: 2 to ``seq_len + 1`` tokens. Raises as ``[index]``."""
        item = self._own.item(index)
        place = self.describe(index)
        sample = as_sample(item if self._each is None else self._each(item), place)
        require_ids(sample.tokens, self.vocab_size, place)
        if sample.labels is not None:
            _check_labels(sample.labels, place, self.vocab_size)
        if not 2 <= sample.tokens.size <= self._seq_len + 1:
            raise DataError(
                f"{place} has {sample.tokens.size} tokens; allowed are 2 to data.seq_len + 1 "
                f"(data.seq_len={self._seq_len}): cut it in the data set, or raise data.seq_len"
            )
        return sample

    def describe(self, index: int) -> str:
        return self._own.describe(index)

    def fingerprint(self) -> str:
        return digest([self._own.fingerprint, self.vocab_size, self._seq_len])


class AdaptedRecords:
    """Samples that only a model of the user's own understands. Build it with :func:`adapt`."""

    def __init__(
        self,
        own: _Own,
        *,
        example: Record,
        vocab_size: int,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.vocab_size = vocab_size
        self.draws = own.may_draw
        self.example = example
        self._own = own
        self._collate = collate
        place = f"a sample of {own.name}"
        self._kind = None if self._collate else _kind(_tensors(example.item, place))

    def __len__(self) -> int:
        return self._own.size

    def __getitem__(self, index: int) -> Record:
        item = self._own.item(index)
        if self._kind is None:
            return Record(item=item)
        place = self.describe(index)
        tensors = _tensors(item, place)
        if _kind(tensors) != self._kind:
            raise DataError(
                f"{place} holds {_shapes(_kind(tensors))}, the first sample {_shapes(self._kind)}; "
                "samples of several shapes need a collate that pads them"
            )
        return Record(item=tensors)

    def collate(self, records: Sequence[Record]) -> Fields:
        items = [record.item for record in records]
        if self._collate is None:
            rows = [_tensors(item, self._own.name) for item in items]
            return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        batch = self._collate(items)
        if not isinstance(batch, Mapping | tuple | list):
            raise DataError(
                f"{self._own.name}: collate gives {type(batch).__name__}; it must give a mapping "
                "of tensors by name"
            )
        fields = _tensors(batch, f"{self._own.name}: collate")
        for name, tensor in fields.items():
            if tensor.ndim < 1 or tensor.shape[0] != len(items):
                raise DataError(
                    f"{self._own.name}: collate of {len(items)} samples gives {name!r} of shape "
                    f"{list(tensor.shape)}; its first dimension must be the number of samples"
                )
        return fields

    def describe(self, index: int) -> str:
        return self._own.describe(index)

    def fingerprint(self) -> str:
        return digest([self._own.fingerprint, self.vocab_size])


def _vocab_size(dataset: MapStyle, name: str) -> int:
    own = getattr(dataset, "vocab_size", None)
    if own is not None:
        return int(own)
    raise DataError(
        f"data.vocab_size is not set, and {name} has no vocab_size that says how many token ids "
        "there are; set either"
    )


# ---- samples


def _is_tokens(item: Any) -> bool:
    if isinstance(item, Mapping):
        return "input_ids" in item and set(item) <= TOKEN_FIELDS
    if isinstance(item, list | tuple | np.ndarray | torch.Tensor):
        try:
            array = np.asarray(item)
        except (TypeError, ValueError, RuntimeError):
            return False
        return array.ndim == 1 and array.dtype.kind in "iu"
    return isinstance(item, Sample)


def _only(batch: Any) -> Any:
    """The only sample of a batch of one."""
    if isinstance(batch, Mapping) and _is_tokens(batch):
        return {name: values[0] for name, values in batch.items()}
    return batch


def as_sample(item: Any, place: str) -> Sample:
    """
    Raises:
        DataError: it has no token ids.
    """
    if isinstance(item, Sample):
        return item
    given = item if isinstance(item, Mapping) else {"input_ids": item}
    if "input_ids" not in given or not set(given) <= TOKEN_FIELDS:
        raise DataError(f"{place} holds {sorted(map(str, given))}, and the first sample input_ids")
    arrays = {
        name: _ids(values, f"{place}: {name}")
        for name, values in given.items()
        if name == "input_ids" or values is not None
    }
    tokens, labels, mask = arrays["input_ids"], arrays.get("labels"), arrays.get("attention_mask")
    for name, values in arrays.items():
        if values.shape != tokens.shape:
            raise DataError(
                f"{place}: {name} has {values.size} entries, input_ids {tokens.size}; it needs one "
                "for each token (what a token is to be predicted as stands at its own place)"
            )
    if mask is not None:
        if (np.diff(mask) > 0).any():
            raise DataError(
                f"{place}: attention_mask is 0 before a token that counts; pad at the end"
            )
        num_real = int((mask != 0).sum())
        tokens, labels = tokens[:num_real], None if labels is None else labels[:num_real]
    return Sample(tokens=tokens, segments=None, labels=labels)


def _ids(values: Any, place: str) -> Tokens:
    try:
        array = np.asarray(values)
    except Exception as error:
        raise DataError(f"{place}: is no list of token ids ({error})") from None
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise DataError(
            f"{place}: is {array.dtype} of shape {list(array.shape)}; it must be one dimension of "
            "whole numbers"
        )
    return array.astype(np.int64)


def _check_labels(labels: Tokens, place: str, vocab_size: int) -> None:
    bad = np.flatnonzero((labels != NOT_COUNTED) & ((labels < 0) | (labels >= vocab_size)))
    if bad.size:
        raise DataError(
            f"{place}: label {bad[0]} of it is {labels[bad[0]]}, allowed are {NOT_COUNTED} (does "
            f"not count) and 0..{vocab_size - 1} (data.vocab_size={vocab_size})"
        )


def _tensors(item: Any, place: str) -> Fields:
    """
    Raises:
        DataError: it is not a mapping of numbers, arrays and tensors.
    """
    if isinstance(item, tuple | list):
        item = {str(number): part for number, part in enumerate(item)}
    if not isinstance(item, Mapping):
        raise DataError(
            f"{place} is {type(item).__name__}; a sample is a mapping of tensors or arrays by "
            "name, or a tuple of them, or token ids, or anything that the data set's own collate "
            "takes"
        )
    fields = {}
    for name, value in item.items():
        try:
            tensor = (
                value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
            )
        except (TypeError, ValueError, RuntimeError):
            raise DataError(
                f"{place}: {name!r} is {type(value).__name__}, which makes no tensor; give "
                "numbers, or a collate that makes tensors of it"
            ) from None
        fields[str(name)] = tensor.detach()
    return fields


def _kind(fields: Fields) -> dict[str, tuple[str, list[int]]]:
    return {
        name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in sorted(fields.items())
    }


def _shapes(kind: Mapping[str, tuple[str, list[int]]]) -> str:
    return ", ".join(f"{name} {dtype}{shape}" for name, (dtype, shape) in kind.items())


# ---- fingerprints


def contents(item: Any) -> bytes:
    """SHA-256 of a sample's contents; of an object that is neither numbers nor a dataclass and has
    no ``tobytes``, of its type alone."""
    hashed = hashlib.sha256()
    _hash(hashed, item)
    return hashed.digest()


def _hash(hashed: Any, item: Any) -> None:
    if dataclasses.is_dataclass(item):  # a Sample, a Record, or the user's own
        item = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    if isinstance(item, Mapping):
        hashed.update(f"{{{len(item)}".encode())
        for name in sorted(item, key=str):
            hashed.update(repr(name).encode())
            _hash(hashed, item[name])
    elif isinstance(item, torch.Tensor):
        whole = item.detach().cpu().contiguous()
        hashed.update(f"{whole.dtype}{list(whole.shape)}".encode())
        hashed.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(item, np.ndarray):
        hashed.update(f"{item.dtype}{item.shape}".encode())
        hashed.update(repr(item.tolist()).encode() if item.dtype.hasobject else item.tobytes())
    elif isinstance(item, list | tuple):
        hashed.update(f"[{len(item)}".encode())
        for part in item:
            _hash(hashed, part)
    elif isinstance(item, bytes | bytearray):
        hashed.update(bytes(item))
    elif item is None or isinstance(item, str | int | float | bool | complex | np.generic):
        hashed.update(repr(item).encode())
    else:
        own = getattr(item, "tobytes", None)  # such as an image
        hashed.update(type(item).__qualname__.encode())
        hashed.update(own() if callable(own) else b"")

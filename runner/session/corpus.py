"""Turns the data settings into a data set and its order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from runner.config.mappings import held_out_sets, sources_of
from runner.config.schema import SYNTHETIC_VOCABULARY, DataConfig, DataKind, RunConfig
from runner.data.corpus_digest import Progress, notes_in
from runner.data.cursor import SampleStream
from runner.data.dataset import Dataset
from runner.data.documents import PYTHON_LIBRARY
from runner.data.draws import kept_while_drawing, seed_by_position
from runner.data.feed import Feed, RankShare
from runner.data.mixture import Mixed, MixtureOrder, mix
from runner.data.packing import Packed, Unpadded, prepare_packs
from runner.data.rows import Rows
from runner.data.synthetic import SyntheticLanguage
from runner.data.text import Prepared, open_prepared, prepare_text
from runner.data.tokens import open_tokens
from runner.data.user_dataset import Adapted, MapStyle, adapt
from runner.distributed.env import RankEnv
from runner.system.environment import variables
from runner.system.error import DataError
from runner.system.units import first_few
from runner.system.user_code import call_target, parameters_of

# Paths of prepared tokens, one for each source; "" if nothing had to be prepared.
Places = Sequence[str]


def prepare_data(config: RunConfig, progress: Progress) -> list[Prepared | None]:
    """Tokenise into the cache; one process of each node does it for all of them.

    Args:
        progress: called with the progress; if it raises, no file is left.

    Returns:
        For each source, what :func:`open_dataset` needs; None if nothing has to be prepared.

    Raises:
        DataError: the corpus cannot be used.
    """
    prepared = [_prepare(data, seed, progress) for data, seed in _parts(config)]
    sets = held_out_sets(config.data).values()  # after the sources
    return prepared + [_prepare(data, config.seed, progress) for data in sets]


def open_dataset(
    config: RunConfig,
    prepared: Places | None = None,
    *,
    progress: Progress = lambda what, done, total: None,
) -> Dataset:
    """Open the corpus.

    Args:
        prepared: the paths from :func:`prepare_data` in any process of this node; None prepares the
            data in this process.
        progress: called with the progress.

    Raises:
        DataError: the corpus cannot be used.
    """
    if prepared is None:
        prepared = [str(p.place) if p else "" for p in prepare_data(config, progress)]
    opened = [
        _open(data, seed, place)
        for (data, seed), place in zip(_parts(config), prepared, strict=False)
    ]
    sources = sources_of(config.data)
    if not sources:
        return opened[0]
    # Sorted by name: order and fingerprint must not depend on the order of ``data.sources``.
    named = {s.name: one for s, one in zip(sources, opened, strict=True)}
    return mix({name: named[name] for name in sorted(named)})


def open_data(config: RunConfig, prepared: Places) -> tuple[Dataset, SampleStream, Dataset | None]:
    """Open the corpus, the order of its samples, and the held-out sets; see the next functions."""
    dataset = open_dataset(config, prepared)
    return dataset, sample_stream(config, dataset), open_validation(config, prepared)


def open_validation(config: RunConfig, prepared: Places) -> Dataset | None:
    """Open ``data.val_path``, if set; several sets become one, in the order of names.

    Raises the errors of :func:`open_dataset`.

    Args:
        prepared: see :func:`open_dataset`.
    """
    sets = held_out_sets(config.data)
    if not sets:
        return None
    opened = {
        name: _open(data, config.seed, place)
        for (name, data), place in zip(sets.items(), prepared[-len(sets) :], strict=True)
    }
    return opened[""] if "" in opened else mix(opened)


def sample_stream(config: RunConfig, dataset: Dataset) -> SampleStream:
    """Make the order of samples."""
    if not isinstance(dataset, Mixed):
        return SampleStream.of_one(
            num_samples=len(dataset),
            seed=config.seed,
            held_out_share=config.data.held_out if config.data.val_path is None else 0.0,
            global_size=config.batch.global_size,
        )
    order = MixtureOrder(
        dataset.lengths,
        seed=config.seed,
        held_out_share=config.data.held_out,
        weights={source.name: source.weight for source in sources_of(config.data)},
    )
    return SampleStream(order, global_size=config.batch.global_size)


def open_feed(
    config: RunConfig, dataset: Dataset, stream: SampleStream, place: RankEnv, device: torch.device
) -> Feed:
    """Make this rank's loader."""
    return Feed(
        dataset,
        stream,
        settings=config.data,
        share=RankShare(
            global_size=config.batch.global_size,
            micro_size=config.batch.micro_size,
            rank=place.rank,
            world_size=place.world_size,
        ),
        pin_memory=device.type == "cuda",
        seed=config.seed,
    )


def _parts(config: RunConfig) -> list[tuple[DataConfig, int]]:
    """Settings and seed of each source, or of the corpus itself if it has no sources."""
    sources = sources_of(config.data)
    if not sources:
        return [(config.data, config.seed)]
    return [(s.data, config.seed if s.seed is None else s.seed) for s in sources]


def _prepare(data: DataConfig, seed: int, progress: Progress) -> Prepared | None:
    if data._target_ is not None or data.kind is not DataKind.text:
        return _prepare_rows(data, seed, progress)
    return prepare_text(data, token_cache(data.cache), progress=progress)


def _prepare_rows(data: DataConfig, seed: int, progress: Progress) -> Prepared | None:
    """Render the rows once, if that is expensive; every rank does the rest in memory."""
    if data._target_ is None and data.kind is not DataKind.hf:
        return None
    rows = _rows(data) if data._target_ is None else None
    notice = rows.notice() if rows is not None else ""
    if not data.pack:
        return Prepared(place=Path(), notice=notice) if rows is not None else None
    dataset = _samples(data, seed)
    place, unreadable = prepare_packs(
        _unpadded(dataset),
        seq_len=data.seq_len,
        cache=token_cache(data.cache),
        progress=progress,
        retry_seconds=data.retry_seconds,
    )
    return Prepared(place=place, notice="; ".join(filter(None, (notice, unreadable))))


def _unpadded(dataset: Dataset) -> Unpadded:
    if isinstance(dataset, Adapted):
        return dataset
    raise DataError("data.pack=true: the samples have no token ids; remove the setting")


def _rows(data: DataConfig) -> Rows:
    return Rows(data, token_cache(data.cache) / "rows")


def _samples(data: DataConfig, seed: int) -> Dataset:
    """The samples of the user's code, or of rows."""
    if data._target_ is not None:
        return _own_dataset(data, seed, data._target_)
    return _adapt(_rows(data), data, "data.path")


def _adapt(samples: MapStyle, data: DataConfig, name: str) -> Dataset:
    return adapt(
        samples,
        vocab_size=data.vocab_size,
        seq_len=data.seq_len,
        name=name,
        may_draw=not isinstance(samples, Rows),
        retry_seconds=data.retry_seconds,
    )


def _open(data: DataConfig, seed: int, place: str) -> Dataset:
    """
    Args:
        place: path of the prepared data, or empty.
    """
    if data._target_ is not None or data.kind is DataKind.hf:
        dataset = _samples(data, seed)
        if not data.pack:
            return dataset
        return Packed(_unpadded(dataset), Path(place), seq_len=data.seq_len)
    if data.kind is DataKind.synthetic:
        return SyntheticLanguage(
            vocab_size=data.vocab_size or SYNTHETIC_VOCABULARY,
            samples=data.samples,
            seq_len=data.seq_len,
            seed=seed,
        )
    if data.kind is DataKind.tokens:
        return open_tokens(data)
    return open_prepared(Path(place), data)


def _own_dataset(data: DataConfig, seed: int, target: str) -> Dataset:
    """Open the data set that the user's code returns.

    A parameter named like a key of the group gets that key's value, if the user set the key or the
    parameter has no default; ``seed`` and ``seq_len`` are passed in the same way.
    """
    usual = DataConfig()
    path = data.path[0] if len(data.path) == 1 else data.path
    known = {spec.name: getattr(data, spec.name) for spec in dataclasses.fields(data)}
    known |= {"path": path, "seed": seed}
    required = {
        name
        for name, parameter in parameters_of("data._target_", target).items()
        if parameter.default is parameter.empty
    }
    with kept_while_drawing():
        seed_by_position(seed, -1)
        own = call_target(
            "data._target_",
            target,
            data.arguments or {},
            {
                name: value
                for name, value in known.items()
                if name in required or name == "seq_len" or value != getattr(usual, name, seed)
            },
        )
    return _adapt(own, data, target)


def data_words(data: DataConfig, dataset: Dataset) -> str:
    """Where the samples come from, for a person: "corpus (396 files, 1.7 MB)"."""
    sources = sources_of(data)
    if sources and isinstance(dataset, Mixed):
        named = {source.name: source.data for source in sources}
        words = [f"{name} = {data_words(named[name], one)}" for name, one in dataset.items()]
        return first_few(words, between="; ")
    if data._target_ is not None:
        return data._target_
    if data.kind is DataKind.synthetic:
        return "a synthetic language"
    place = first_few(data.path)
    if data.path == [PYTHON_LIBRARY]:
        place = "Python's standard library"
    contents = getattr(dataset, "contents", "")
    return f"{place} ({contents})" if contents else place


def digest_notes(data: DataConfig) -> Path:
    """The folder with the remembered digests of whole files."""
    return notes_in(token_cache(data.cache))


def token_cache(wanted: str | None) -> Path:
    """The folder for token files: the configured one, or the user's cache directory (XDG)."""
    if wanted is not None:
        return Path(wanted).expanduser()
    base = variables().get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "holdfast"

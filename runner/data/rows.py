"""Tables of rows read through Hugging Face's ``datasets``: Parquet, JSON lines, Arrow, CSV, or a
folder that ``save_to_disk`` wrote. A row is a sample: its token ids, its text, or its chat.

Must not know the configuration but for the keys that messages name; nothing is downloaded.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from runner.data.chat import ChatTokens
from runner.data.dataset import (
    Sample,
    Tokens,
    contents_of,
    digest,
    fingerprint_files,
    is_sampled,
    spread,
)
from runner.data.tokenizer import Codec, Mark, open_codec
from runner.system.error import DataError, MissingPackage
from runner.system.extras import lacking

_READERS: Final = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
_PLAIN: Final = (".gz", ".zst")
_SHOWN: Final = 12  # columns named in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """Where the rows are, and what in them is a sample.

    Attributes:
        paths: files, patterns such as ``rows/*.parquet``, or folders.
        field: the column of a row's text, where the rows have no ``input_ids``.
        messages: the column of a row's chat: it goes through the tokenizer's chat template, and
            only what the assistant says is counted; None: rows are no chats.
        tokenizer: see :func:`runner.data.tokenizer.open_codec`; chats need a folder.
        cache: directory for the tables that ``datasets`` makes from the files.
    """

    paths: Sequence[str]
    field: str | None
    messages: str | None
    tokenizer: str | None
    cache: Path
    begin_token: Mark = None
    end_token: Mark = None


class Rows:
    """A map-style data set of token ids for :func:`runner.data.user_dataset.adapt`.

    Rows of more than ``seq_len + 1`` tokens are cut there.
    """

    def __init__(self, source: RowSource, *, seq_len: int, vocab_size: int | None) -> None:
        self._files = _files(source.paths)
        self.contents = contents_of(len(self._files), sum(map(_num_bytes, self._files)))
        self._table = _table(self._files, source)
        self._seq_len = seq_len
        self._text: str | None = None
        self._chat: ChatTokens | None = None
        self._codec: Codec | None = None
        columns = list(self._table.column_names)
        if source.messages is not None:
            self._require(source.messages, columns, "data.messages")
            if source.tokenizer is None:
                raise DataError(
                    f"data.messages={source.messages}: a chat needs the chat template of a "
                    "tokenizer; set data.tokenizer to its folder"
                )
            self._chat = ChatTokens(source.tokenizer, column=source.messages)
            self.vocab_size = vocab_size or self._chat.vocab_size
        elif "input_ids" in columns:
            if vocab_size is not None:
                self.vocab_size = vocab_size
        else:
            self._text = self._require(source.field or "text", columns, "data.field")
            codec = self._codec = open_codec(
                source.tokenizer, begin_token=source.begin_token, end_token=source.end_token
            )
            self.vocab_size = vocab_size or codec.vocab_size

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Sample:
        tokens, labels = self._row(index)
        cut = self._seq_len + 1
        return Sample(
            tokens=tokens[:cut], segments=None, labels=None if labels is None else labels[:cut]
        )

    def describe(self, index: int) -> str:
        name = self._files[0].name + (
            f" and {len(self._files) - 1} more" if self._files[1:] else ""
        )
        return f"{name} row {index}"

    def fingerprint(self) -> str:
        """A digest of the files, the column and the tokenizer."""
        made_by = self._chat or self._codec
        return digest(
            [
                fingerprint_files(self._named()),
                self._text,
                None if made_by is None else made_by.identity,
                self._seq_len,
            ]
        )

    @property
    def sampled_files(self) -> tuple[tuple[str, Path], ...]:
        """See :func:`runner.data.dataset.sampled_files`."""
        named = self._named()
        return tuple(named) if is_sampled(sum(path.stat().st_size for _, path in named)) else ()

    def notice(self) -> str:
        """A line that says how many of some rows are cut; empty if none is."""
        looked = [index for index, _ in spread(len(self), block=1, whole=False)]
        long = sum(self._row(index)[0].size > self._seq_len + 1 for index in looked)
        if not long:
            return ""
        is_text = self._text is not None and all(
            _ending(file) == ".parquet" for file in self._files
        )
        remedy = "; data=text reads .parquet whole, a document a row" if is_text else ""
        return (
            f"data.path: {long} of {len(looked)} inspected rows have more than data.seq_len + 1 = "
            f"{self._seq_len + 1} tokens, and are cut there{remedy}"
        )

    def _row(self, index: int) -> tuple[Tokens, Tokens | None]:
        row = self._table[int(index)]
        if self._chat is not None:
            return self._chat.encode(row)
        if self._codec is None:
            return _own_ids(row)
        text = row[self._text]
        if not isinstance(text, str):
            raise DataError(f"data.field={self._text}: holds {type(text).__name__}, no text")
        [ids] = self._codec.encode([text.encode()])
        begin = [] if self._codec.begin_token is None else [self._codec.begin_token]
        return np.concatenate([begin, ids, [self._codec.end_token]]).astype(np.int64), None

    def _named(self) -> list[tuple[str, Path]]:
        return [
            (path.name, path)
            for file in self._files
            for path in ([file] if file.is_file() else sorted(file.glob("**/*.arrow")))
        ]

    def _require(self, column: str, columns: Sequence[str], key: str) -> str:
        if column in columns:
            return column
        raise DataError(
            f"{key}={column}: {self._files[0]} has no such column; it has "
            f"{', '.join(columns[:_SHOWN])}" + (", ..." if columns[_SHOWN:] else "")
        )


def _num_bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("**/*.arrow")
    return sum(file.stat().st_size for file in files)


def _own_ids(row: Mapping[str, Any]) -> tuple[Tokens, Tokens | None]:
    tokens = np.asarray(row["input_ids"], dtype=np.int64)
    labels = None if row.get("labels") is None else np.asarray(row["labels"], dtype=np.int64)
    mask = row.get("attention_mask")
    if mask is not None:
        counted = np.asarray(mask) != 0
        if (np.diff(counted.astype(np.int8)) > 0).any():
            raise DataError("attention_mask is 0 before a token that counts; pad at the end")
        tokens, labels = tokens[counted], None if labels is None else labels[counted]
    if labels is not None and labels.shape != tokens.shape:
        raise DataError(f"labels has {labels.size} entries, input_ids {tokens.size}")
    return tokens, labels


def _files(paths: Sequence[str]) -> list[Path]:
    if not paths:
        raise DataError("data.path=[] names no rows; give files such as 'rows/*.parquet'")
    files: list[Path] = []
    for text in paths:
        path = Path(text).expanduser()
        several = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        if path.is_dir() and not _is_saved(path):
            several = sorted(file for file in path.iterdir() if _ending(file) is not None)
        if not several:
            raise DataError(
                f"data.path={text}: names no file; rows are in {', '.join(_READERS)} or .arrow "
                "files, or in a folder that save_to_disk wrote"
            )
        files += several
    return files


def _is_saved(path: Path) -> bool:
    return (path / "state.json").is_file()


def _ending(path: Path) -> str | None:
    name = path.name
    for ending in _PLAIN:
        name = name.removesuffix(ending)
    suffix = Path(name).suffix
    return suffix if suffix in _READERS or suffix == ".arrow" else None


def _table(files: Sequence[Path], source: RowSource) -> Any:
    """A ``datasets.Dataset`` of all rows in the order of the files."""
    try:
        import datasets
    except ImportError as error:
        raise MissingPackage(lacking(f"data.path={files[0]}", "hf")) from error
    datasets.disable_progress_bars()
    endings = {_ending(file) if file.is_file() else "saved" for file in files}
    if len(endings) != 1 or None in endings:
        shown = ", ".join(file.name for file in files[:_SHOWN])
        raise DataError(
            f"data.path={list(source.paths)}: names {shown}; all must be of one kind, of "
            f"{', '.join(_READERS)}, .arrow, or folders that save_to_disk wrote"
        )
    [ending] = endings
    try:
        if ending == "saved":
            parts = [datasets.load_from_disk(str(file)) for file in files]
        elif ending == ".arrow":
            parts = [datasets.Dataset.from_file(str(file)) for file in files]
        else:
            names = [str(file.absolute()) for file in files]
            return datasets.load_dataset(
                _READERS[str(ending)], data_files=names, split="train", cache_dir=str(source.cache)
            )
    # Whatever the library and those below it raise for a damaged file.
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise DataError(
            f"data.path={list(source.paths)}: cannot be read as rows ({cause})"
        ) from error
    if any(isinstance(part, datasets.DatasetDict) for part in parts):
        raise DataError(
            f"data.path={files[0]}: holds several splits; name one of its folders, such as "
            f"{files[0]}/train"
        )
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)

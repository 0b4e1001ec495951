"""Tables of rows read through Hugging Face's ``datasets``: Parquet, JSON lines, Arrow, CSV, or a
folder that ``save_to_disk`` wrote. A row is a sample: its token ids, its text, or its chat.

Nothing is downloaded.
"""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from runner.config.schema import DataConfig
from runner.data.dataset import (
    NOT_COUNTED,
    Sample,
    Tokens,
    contents_of,
    digest,
    fingerprint_files,
    is_sampled,
    spread,
)
from runner.data.tokenizer import Codec, open_codec
from runner.data.user_dataset import TOKEN_FIELDS, as_sample
from runner.system.environment import changeable
from runner.system.error import DataError, imported

_READERS: Final = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
_PLAIN: Final = (".gz", ".zst", ".xz", ".bz2")
_SHOWN: Final = 12  # columns named in a message


class Rows:
    """A map-style data set of token ids for :func:`runner.data.user_dataset.adapt`.

    Rows of more than ``seq_len + 1`` tokens are cut there.

    Args:
        data: a row's ``messages`` go through the tokenizer's chat template, and only what the
            assistant says is counted; otherwise ``field`` is its text, without ``input_ids``.
        cache: directory for the tables that ``datasets`` makes from the files.
    """

    def __init__(self, data: DataConfig, cache: Path) -> None:
        files = _files(data.path)
        self._name = files[0].name + (f" and {len(files) - 1} more" if files[1:] else "")
        self._named = [
            (path.name, path)
            for file in files
            for path in ([file] if file.is_file() else sorted(file.glob("**/*.arrow")))
        ]
        num_bytes = sum(path.stat().st_size for _, path in self._named)
        self.contents = contents_of(len(files), num_bytes)
        self.sampled_files = tuple(self._named) if is_sampled(num_bytes) else ()
        self._table = _table(files, data.path, cache)
        self._seq_len = data.seq_len
        self._text = data.field or "text"
        self._chat: ChatTokens | None = None
        self._codec: Codec | None = None
        self._reads_tables = all(_ending(file) == ".parquet" for file in files)
        if data.messages is not None:
            self._require(data.messages, "data.messages")
            if data.tokenizer is None:
                raise DataError(
                    f"data.messages={data.messages}: a chat needs the chat template of a "
                    "tokenizer; set data.tokenizer to its folder"
                )
            self._chat = ChatTokens(data.tokenizer, column=data.messages)
        elif "input_ids" not in self._table.column_names:
            self._require(self._text, "data.field")
            self._codec = open_codec(
                data.tokenizer, begin_token=data.begin_token, end_token=data.end_token
            )
        made_by = self._chat or self._codec
        self._identity = None if made_by is None else made_by.identity
        if data.vocab_size or made_by:
            self.vocab_size = data.vocab_size or (made_by.vocab_size if made_by else 0)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Sample:
        tokens, labels = self._row(index)
        cut = self._seq_len + 1
        return Sample(
            tokens=tokens[:cut], segments=None, labels=None if labels is None else labels[:cut]
        )

    def describe(self, index: int) -> str:
        return f"{self._name} row {index}"

    def fingerprint(self) -> str:
        """A digest of the files, the column and the tokenizer."""
        column = None if self._codec is None else self._text
        return digest([fingerprint_files(self._named), column, self._identity, self._seq_len])

    def notice(self) -> str:
        """A line that says how many of some rows are cut; empty if none is."""
        looked = [index for index, _ in spread(len(self), block=1, whole=False)]
        long = sum(self._row(index)[0].size > self._seq_len + 1 for index in looked)
        if not long:
            return ""
        is_text = self._codec is not None and self._reads_tables
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
            given = {name: row[name] for name in TOKEN_FIELDS if row.get(name) is not None}
            sample = as_sample(given, self.describe(index))
            return sample.tokens, sample.labels
        text = row[self._text]
        if not isinstance(text, str):
            raise DataError(f"data.field={self._text}: holds {type(text).__name__}, no text")
        [ids] = self._codec.encode([text.encode()])
        begin = [] if self._codec.begin_token is None else [self._codec.begin_token]
        return np.concatenate([begin, ids, [self._codec.end_token]]).astype(np.int64), None

    def _require(self, column: str, key: str) -> None:
        columns = self._table.column_names
        if column not in columns:
            raise DataError(
                f"{key}={column}: no such column in {self._name}, but "
                f"{', '.join(columns[:_SHOWN])}{', ...' if columns[_SHOWN:] else ''}. Set "
                "data.field to the column of the text, or data.messages to that of a chat"
            )


def _files(paths: Sequence[str]) -> list[Path]:
    if not paths:
        raise DataError("data.path=[] names no rows; give files such as 'rows/*.parquet'")
    files: list[Path] = []
    for text in paths:
        path = Path(text).expanduser()
        several = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        if path.is_dir() and not (path / "state.json").is_file():
            several = sorted(file for file in path.iterdir() if _ending(file) is not None)
        if not several:
            raise DataError(
                f"data.path={text}: names no file; rows are in {', '.join(_READERS)} or .arrow "
                "files, or in a folder that save_to_disk wrote"
            )
        files += several
    return files


def _ending(path: Path) -> str | None:
    name = path.name
    for ending in _PLAIN:
        name = name.removesuffix(ending)
    suffix = Path(name).suffix
    return suffix if suffix in _READERS or suffix == ".arrow" else None


def _table(files: Sequence[Path], paths: Sequence[str], cache: Path) -> Any:
    """A ``datasets.Dataset`` of all rows in the order of the files."""
    datasets = imported("datasets", f"data.path={files[0]}", "hf")
    datasets.disable_progress_bars()
    endings = {_ending(file) if file.is_file() else "saved" for file in files}
    if len(endings) != 1 or None in endings:
        shown = ", ".join(file.name for file in files[:_SHOWN])
        raise DataError(
            f"data.path={list(paths)}: names {shown}; all must be of one kind, of "
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
                _READERS[str(ending)], data_files=names, split="train", cache_dir=str(cache)
            )
    # Whatever the library and those below it raise for a damaged file.
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise DataError(f"data.path={list(paths)}: cannot be read as rows ({cause})") from error
    if any(isinstance(part, datasets.DatasetDict) for part in parts):
        raise DataError(
            f"data.path={files[0]}: holds several splits; name one of its folders, such as "
            f"{files[0]}/train"
        )
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


# ---- chats as token ids, through a tokenizer's own chat template; only answers are counted


_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json",
                 "merges.txt", "tokenizer.model", "special_tokens_map.json")  # fmt: skip
_ANSWERS: Final = re.compile(r"\{%-?\s*generation\b")  # how a template marks them, if it does


class ChatTokens:
    """Turns a row's messages into ids and labels: -100 outside of the assistant's answers.

    Answers are known from the template's own marks (``{% generation %}``); without
    them, from what each answer adds to the text of the messages before it.

    Args:
        folder: of the tokenizer. Nothing is downloaded, and no code in it is run.
        column: the column of a row with its messages: a list of {role, content}.

    Raises:
        DataError: it cannot be read, or has no chat template.
    """

    def __init__(self, folder: str, *, column: str) -> None:
        self._column = column
        self._tokenizer = _open(folder)
        template = self._tokenizer.chat_template
        if not template:
            raise DataError(
                f"data.tokenizer={folder}: has no chat template; give a tokenizer that has one "
                "(chat_template.jinja, or chat_template in tokenizer_config.json)"
            )
        self._is_marked = _ANSWERS.search(str(template)) is not None
        self.vocab_size = max(len(self._tokenizer), int(self._tokenizer.vocab_size))
        self.identity = digest([_digest(Path(folder).expanduser()), str(template)])

    def encode(self, row: Mapping[str, Any]) -> tuple[Tokens, Tokens]:
        """
        Raises:
            DataError: the template does not accept the chat, or it has no answer.
        """
        messages = row[self._column]
        if not isinstance(messages, list) or not messages:
            raise DataError(f"data.messages={self._column}: holds no list of messages")
        try:
            ids, counted = (
                self._marked(messages) if self._is_marked else self._by_prefixes(messages)
            )
        except DataError:
            raise
        except Exception as error:  # from the template: jinja's errors, TypeError, KeyError...
            cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise DataError(f"the chat template does not take these messages ({cause})") from error
        tokens = np.asarray(ids, dtype=np.int64)
        mask = np.asarray(counted, dtype=np.bool_)
        if not mask.any():
            raise DataError("the assistant says nothing in it, and so nothing is to be learnt")
        return tokens, np.where(mask, tokens, NOT_COUNTED)

    def _marked(self, messages: Sequence[Any]) -> tuple[Sequence[int], Sequence[int]]:
        encoded = self._tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return encoded["input_ids"], encoded["assistant_masks"]

    def _by_prefixes(self, messages: Sequence[Any]) -> tuple[Sequence[int], Sequence[int]]:
        ids = self._ids(messages)
        counted = [0] * len(ids)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._ids(messages[:number], asks=True) if number else []
            upto = self._ids(messages[: number + 1])
            if upto[: len(before)] != before or ids[: len(upto)] != upto:
                raise DataError(
                    "the tokens before an answer are others where the answer follows, so which "
                    "are the answer's is unknown: the chat template changes earlier text, or its "
                    "prompt ends in a space that the tokenizer joins to the answer; mark the "
                    "answer in the template with {% generation %}"
                )
            counted[len(before) : len(upto)] = [1] * (len(upto) - len(before))
        return ids, counted

    def _ids(self, messages: Sequence[Any], *, asks: bool = False) -> list[int]:
        encoded = self._tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, add_generation_prompt=asks
        )
        return [int(number) for number in encoded["input_ids"]]


def _open(folder: str) -> Any:
    transformers = imported("transformers", f"data.tokenizer={folder}", "hf")
    # Unset, the library warns in every loader process that is forked later.
    changeable().setdefault("TOKENIZERS_PARALLELISM", "true")
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise DataError(
            f"data.tokenizer={folder}: is no folder; a chat needs the folder of a tokenizer, with "
            "its tokenizer_config.json"
        )
    try:
        return transformers.AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the library raises errors of many kinds
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise DataError(f"data.tokenizer={folder}: cannot be opened ({cause})") from error


def _digest(folder: Path) -> str:
    hashed = hashlib.sha256()
    for name in _FILES:
        if (folder / name).is_file():
            hashed.update(name.encode() + (folder / name).read_bytes())
    return hashed.hexdigest()

"""Chats as token ids, through a tokenizer's own chat template; only answers are counted."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from runner.data.dataset import NOT_COUNTED, Tokens, digest
from runner.system.environment import changeable
from runner.system.error import DataError, MissingPackage
from runner.system.extras import lacking

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
                    "the chat template changes the text before an answer, so the answer's tokens "
                    "are unknown; mark it in the template with {% generation %}"
                )
            counted[len(before) : len(upto)] = [1] * (len(upto) - len(before))
        return ids, counted

    def _ids(self, messages: Sequence[Any], *, asks: bool = False) -> list[int]:
        encoded = self._tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, add_generation_prompt=asks
        )
        return [int(number) for number in encoded["input_ids"]]


def _open(folder: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingPackage(lacking(f"data.tokenizer={folder}", "hf")) from error
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

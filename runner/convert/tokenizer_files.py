"""The files of a tokenizer: finds and copies them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from runner.system.error import ConfigError
from runner.system.files import read_bounded, write_json
from runner.system.parsing import parse_json

TOKENIZER: Final = "tokenizer.json"
CONFIG: Final = "tokenizer_config.json"
FILES: Final = (
    TOKENIZER,
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)
_TOKENIZER_BYTES: Final = 1 << 26
FAST_CLASS: Final = "PreTrainedTokenizerFast"


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer that transformers would find."""
    return any((folder / name).is_file() for name in (TOKENIZER, CONFIG, "tokenizer.model"))


def copy_tokenizer(source: Path, folder: Path, *, end: int | None = None) -> bool:
    """Copy a tokenizer's files, and add what transformers needs beside a lone ``tokenizer.json``.

    Args:
        source: a folder, or a ``tokenizer.json``.
        end: the token that ends a document, used if the files do not name one.

    Returns:
        Whether there was a tokenizer to copy.

    Raises:
        ConfigError: it cannot be copied.
    """
    try:
        if source.is_file():
            shutil.copyfile(source, folder / TOKENIZER)
        for name in FILES:
            # Not onto itself: an export may go into the tokenizer's own folder.
            if (source / name).is_file() and source.resolve() != folder.resolve():
                shutil.copyfile(source / name, folder / name)
        if (folder / TOKENIZER).is_file() and not (folder / CONFIG).is_file():
            called = None if end is None else _name_of(folder / TOKENIZER, end)
            write_json(folder / CONFIG, {"tokenizer_class": FAST_CLASS, "eos_token": called})
    except OSError as error:
        raise ConfigError(f"{source}: cannot be copied to {folder} ({error})") from None
    return has_tokenizer(folder)


def _name_of(path: Path, token: int) -> str | None:
    """The text of a token that was added to the vocabulary of a ``tokenizer.json``."""
    try:
        tree = parse_json(read_bounded(path, _TOKENIZER_BYTES, follow=True))
        return next((new["content"] for new in tree["added_tokens"] if new["id"] == token), None)
    except (ValueError, KeyError, TypeError, RecursionError):  # it is as it is
        return None

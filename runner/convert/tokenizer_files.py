"""The files of a tokenizer: finds and copies them, and writes one for bytes as tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

from runner.system.error import ConfigError
from runner.system.files import read_bounded, write_json
from runner.system.parsing import parse_json

_TOKENIZER: Final = "tokenizer.json"
_CONFIG: Final = "tokenizer_config.json"
FILES: Final = (
    _TOKENIZER,
    _CONFIG,
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
_CLASS: Final = "PreTrainedTokenizerFast"
BYTE_END_NAME: Final = "<|end|>"


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer that transformers would find."""
    return any((folder / name).is_file() for name in (_TOKENIZER, _CONFIG, "tokenizer.model"))


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
            shutil.copyfile(source, folder / _TOKENIZER)
        for name in FILES:
            # Not onto itself: an export may go into the tokenizer's own folder.
            if (source / name).is_file() and source.resolve() != folder.resolve():
                shutil.copyfile(source / name, folder / name)
        if (folder / _TOKENIZER).is_file() and not (folder / _CONFIG).is_file():
            called = None if end is None else _name_of(folder / _TOKENIZER, end)
            write_json(folder / _CONFIG, {"tokenizer_class": _CLASS, "eos_token": called})
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


def write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are the 256 bytes and an end mark, id 256."""
    vocab: dict[str, int] = {letter: byte for byte, letter in enumerate(_letters())}
    end: dict[str, Any] = {"id": len(vocab), "content": BYTE_END_NAME, "special": True}
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    write_json(
        folder / _TOKENIZER,
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [end | usual],
            "normalizer": None,
            "pre_tokenizer": level | {"use_regex": False},
            "post_processor": None,
            "decoder": level | {"use_regex": False},
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        },
    )
    write_json(folder / _CONFIG, {"tokenizer_class": _CLASS, "eos_token": BYTE_END_NAME})


def _letters() -> list[str]:
    """The letter that byte-level tokenizers show each byte as (Radford et al. 2019, GPT-2).

    A printable byte is shown as itself, any other as the next unused character from 256 on.
    """
    printed = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]

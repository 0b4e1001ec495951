"""The files of a tokenizer: which they are, copies of them, and one for bytes as tokens."""

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
    """Whether there is one that transformers would find."""
    return any((folder / name).is_file() for name in (_TOKENIZER, _CONFIG, "tokenizer.model"))


def copy_tokenizer(source: Path, folder: Path, *, end: int | None = None) -> bool:
    """Copy a tokenizer's files, and add what transformers needs beside a lone ``tokenizer.json``.

    Args:
        source: a folder, or a ``tokenizer.json``.
        end: the token that ends a document, where the files beside do not say it.

    Returns:
        Whether there was one.

    Raises:
        ConfigError: it cannot be copied.
    """
    try:
        if source.is_file():
            shutil.copyfile(source, folder / _TOKENIZER)
        for name in FILES:
            # Not onto itself, where somebody exports beside the tokenizer.
            if (source / name).is_file() and source.resolve() != folder.resolve():
                shutil.copyfile(source / name, folder / name)
        if (folder / _TOKENIZER).is_file() and not (folder / _CONFIG).is_file():
            called = None if end is None else _name_of(folder / _TOKENIZER, end)
            write_json(folder / _CONFIG, {"tokenizer_class": _CLASS, "eos_token": called})
    except OSError as error:
        raise ConfigError(f"{source}: cannot be copied to {folder} ({error})") from None
    return has_tokenizer(folder)


def _name_of(path: Path, token: int) -> str | None:
    """What a ``tokenizer.json`` calls a token that was added to its vocabulary."""
    try:
        tree = parse_json(read_bounded(path, _TOKENIZER_BYTES, follow=True))
        return next((one["content"] for one in tree["added_tokens"] if one["id"] == token), None)
    except (ValueError, KeyError, TypeError, RecursionError):  # it is as it is
        return None


def write_byte_tokenizer(folder: Path) -> None:
    """A tokenizer whose tokens are the 256 bytes, and an end mark behind them."""
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

    Itself where that can be printed, else the next unused one from 256 on.
    """
    printed = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]

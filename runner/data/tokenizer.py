"""How text becomes token ids, and which ids begin and end a document.

Must not know files of text, nor the cache of tokens.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from runner.data.dataset import digest
from runner.system.environment import changeable
from runner.system.error import DataError, imported
from runner.system.files import read_bounded

BYTE_VOCAB_SIZE: Final = 257
BYTE_END: Final = 256
END_NAMES: Final = ("</s>", "<|endoftext|>", "<eos>", "<|end_of_text|>", "[SEP]")

_TOKENIZER: Final = "tokenizer.json"
_BESIDE: Final = ("tokenizer_config.json", "special_tokens_map.json")
_JSON_BYTES: Final = 1 << 26  # large enough for chat templates and thousands of added tokens

Mark = int | str | None  # a token as the user gives it: its id or its text


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """How bytes of text become token ids.

    Args:
        tokenizer: of the library ``tokenizers``; None: each byte is a token.
        identity: changes whenever the same text would give other tokens.
        notice: which marks are used and why; empty where there was no choice.
        unit: of places, "bytes" where one token is one byte.
    """

    vocab_size: int = BYTE_VOCAB_SIZE
    begin_token: int | None = None
    end_token: int = BYTE_END
    identity: str = "bytes"
    notice: str = ""
    unit: str = "bytes"
    path: Path = Path()
    tokenizer: Any = None

    def encode(self, texts: Sequence[bytes]) -> list[npt.NDArray[Any]]:
        """Encode each text, without marks."""
        if self.tokenizer is None:
            return [np.frombuffer(text, dtype=np.uint8) for text in texts]
        decoded = [text.decode("utf-8", errors="replace") for text in texts]
        try:
            encoded = self.tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        # The library raises bare Exception, as for a vocabulary with a hole.
        except Exception as error:
            raise DataError(
                f"data.tokenizer={self.path}: cannot encode the corpus ({str(error)[:500]}); "
                "repair it, or set null for bytes"
            ) from error
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encoded]


def open_codec(tokenizer: str | None, *, begin_token: Mark, end_token: Mark) -> Codec:
    """Open a Hugging Face tokenizer, or the codec of bytes.

    Args:
        tokenizer: a ``tokenizer.json``, or a folder with one; None: bytes.
        begin_token: put before each document; None: as the tokenizer's files say; "": none.
        end_token: put after each document; None: as they say. An id equal to the vocabulary's
            size adds one of its own.

    Raises:
        DataError: it is not valid, or does not say which token ends a document.
    """
    if tokenizer is None:
        if begin_token in (None, "") and end_token in (None, BYTE_END):
            return Codec()
        raise DataError(
            f"data.begin_token={begin_token}, data.end_token={end_token}: without data.tokenizer "
            f"text is bytes, and {BYTE_END} ends a document; leave both null"
        )
    path = Path(tokenizer).expanduser()
    if path.is_dir():
        path = path / _TOKENIZER
    tokenizers = imported("tokenizers", f"data.tokenizer={path}", "text")
    # Unset, the library warns in every loader process that is forked later.
    changeable().setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        contents = path.read_bytes()
        opened = tokenizers.Tokenizer.from_buffer(contents)
    # The library raises bare Exception for a file it cannot read as a tokenizer.
    except Exception as error:
        converter = (
            "; of SentencePiece transformers makes one: the tokenizer's own class, such as "
            f"LlamaTokenizer.from_pretrained({str(path.parent)!r}).save_pretrained(DIR)"
        )
        raise DataError(
            f"data.tokenizer={path}: is no readable tokenizers JSON file ({str(error)[:500]}); "
            f"give a {_TOKENIZER} or its folder, or null for bytes"
            f"{converter if path.suffix == '.model' else ''}"
        ) from error
    marks = _Marks(path, opened)
    end, why_end = marks.end(end_token)
    begin, why_begin = marks.begin(begin_token)
    contents_digest = hashlib.sha256(contents).hexdigest()
    return Codec(
        vocab_size=max(marks.size, end + 1),
        begin_token=begin,
        end_token=end,
        identity=digest([tokenizers.__version__, contents_digest, begin, end]),
        notice=f"documents end with {why_end}, {why_begin}",
        unit="tokens",
        path=path,
        tokenizer=opened,
    )


class _Marks:
    """Which ids begin and end a document. ``size``: the largest id plus one, with holes."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._ids: dict[str, int] = tokenizer.get_vocab()
        self._beside = {name: _settings(path.with_name(name)) for name in _BESIDE}
        self.size = max(self._ids.values(), default=-1) + 1

    def end(self, mark: Mark) -> tuple[int, str]:
        """(id, its source): as configured, as the files beside it say, or a well-known name."""
        if mark is not None:
            return self._asked("end_token", mark, most=self.size), f"{mark} (data.end_token)"
        if (token := self._configured("eos_token")) is not None:
            text, source = token
            return self._id_of(text, source), f"{text} ({source})"
        for name in END_NAMES:
            if name in self._ids:
                return self._ids[name], f"{name} (by its name; data.end_token is null)"
        raise DataError(
            f"data.tokenizer={self._path}: does not say which token ends a document: no eos_token "
            f"in {' or '.join(_BESIDE)} beside it, and its vocabulary has none of "
            f"{', '.join(END_NAMES)}. Set data.end_token to the token's id or text "
            "(data.end_token='\"<eod>\"'); "
            f"data.end_token={self.size} adds an id of its own"
        )

    def begin(self, wanted: Mark) -> tuple[int | None, str]:
        """The same for the begin of a document; None for no mark."""
        if wanted == "":
            return None, "nothing begins them (data.begin_token)"
        if wanted is not None:
            mark = self._asked("begin_token", wanted, most=self.size - 1)
            return mark, f"begin with {wanted} (data.begin_token)"
        token = self._configured("bos_token")
        if token is None or not self._puts_in_front(token[0]):
            return None, "nothing begins them"
        text, source = token
        return self._id_of(text, source), f"begin with {text} ({source})"

    def _puts_in_front(self, text: str) -> bool:
        """Whether the tokenizer itself puts the token before a text."""
        setting = self._beside[_BESIDE[0]].get("add_bos_token")
        if setting is not None:
            return setting is True
        try:
            ids = self._tokenizer.encode("a").ids
        except Exception:  # a bare Exception; what it cannot encode is reported later
            return False
        return bool(ids) and ids[0] == self._ids.get(text)

    def _asked(self, key: str, mark: int | str, *, most: int) -> int:
        allowed = f"give a token's text, or an id from 0 to {self.size - 1}"
        if isinstance(mark, str) and mark not in self._ids:
            close = difflib.get_close_matches(mark, self._ids, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise DataError(f"data.{key}={mark}: no token of {self._path} is this{hint}; {allowed}")
        number = self._ids[mark] if isinstance(mark, str) else mark
        if not 0 <= number <= most:
            raise DataError(f"data.{key}={mark}: is no token of {self._path}; {allowed}")
        return number

    def _id_of(self, text: str, source: str) -> int:
        if text not in self._ids:
            raise DataError(
                f"{self._path.with_name(source)}: names {text!r}, which is no token of "
                f"{self._path}; set data.begin_token or data.end_token to a token's id or text"
            )
        return self._ids[text]

    def _configured(self, key: str) -> tuple[str, str] | None:
        """A special token's text, and the file beside the tokenizer that has it."""
        for name, settings in self._beside.items():
            value = settings.get(key)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str) and text:
                return text, name
            if value is not None:
                raise DataError(
                    f"{self._path.with_name(name)}: {key} is {str(value)[:100]}, no token's text; "
                    "repair it, or set data.begin_token and data.end_token"
                )
        return None


def _settings(path: Path) -> Mapping[str, Any]:
    """The settings in a file beside the tokenizer; empty if there is none.

    Raises:
        DataError: it cannot be read as a JSON object.
    """
    try:
        tree = json.loads(read_bounded(path, _JSON_BYTES, follow=True))
        if not isinstance(tree, dict):
            raise ValueError("no JSON object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: cannot be read as JSON ({str(error)[:200]}); repair it or remove it"
        ) from error
    return tree

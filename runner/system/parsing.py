"""Writes JSON without NaN, and parses values from files strictly."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

NONFINITE = "nonfinite"


def json_text(
    tree: Mapping[str, Any],
    *,
    indent: int | None = None,
    sort_keys: bool = False,
    is_compact: bool = False,
) -> str:
    """JSON of an object, with null for NaN and infinities, which JSON lacks.

    If there was any, the object has a further field ``nonfinite``: the path of each, such as
    ``detail.losses[2]``, with a word that float() reads back. Every file that the project writes
    goes through here, so that no number can end a run in a writer.
    """
    separators = (",", ":") if is_compact else None
    dumps = partial(
        json.dumps, allow_nan=False, indent=indent, sort_keys=sort_keys, separators=separators
    )
    try:
        return dumps(tree)
    except ValueError:  # searched only on failure: nearly every line is finite
        texts: dict[str, str] = {}
        return dumps(_without_nonfinite(tree, "", texts) | {NONFINITE: texts})


def _without_nonfinite(value: Any, path: str, texts: dict[str, str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        texts[path] = repr(float(value))
        return None
    if isinstance(value, Mapping):
        return {
            _key(key): _without_nonfinite(item, f"{path}.{key}" if path else str(key), texts)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_nonfinite(item, f"{path}[{at}]", texts) for at, item in enumerate(value)]
    return value


def _key(key: Any) -> Any:
    return repr(key) if isinstance(key, float) else key


def refuse_flagged(tree: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: some of its numbers were not finite, so it cannot be used.
    """
    if NONFINITE in tree:
        raise ValueError(f"holds numbers that are not finite: {str(tree[NONFINITE])[:200]}")


def number_in(line: Mapping[str, Any], name: str) -> float | None:
    """A number that :func:`json_text` wrote as ``name``, even if not finite; None for null."""
    value = line.get(name)
    if value is None:
        flags = line.get(NONFINITE)
        value = flags.get(name) if isinstance(flags, dict) else None
    return None if value is None else float(value)


def parse_json(data: bytes) -> Any:
    """Parse JSON; refuses NaN and Infinity, which Python would accept.

    Raises:
        ValueError, RecursionError: it is not JSON.
    """
    return _DECODER.decode(data.decode())


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)  # made once: a file may have a million lines


def whole(value: Any, what: str, *, below: int = 1 << 63) -> int:
    """Check that ``value`` is a whole number from 0 to ``below`` - 1, and not a bool.

    Args:
        what: names it in the message.

    Raises:
        ValueError: it is something else.
    """
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{what} is {str(value)[:40]!r}, no whole number from 0 to {below - 1}")
    return value

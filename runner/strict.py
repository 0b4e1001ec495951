"""Reading what a file says, and refusing what nobody wrote on purpose."""

from __future__ import annotations

import json
from typing import Any


def parse_json(data: bytes) -> Any:
    """The JSON value; NaN and Infinity, which Python reads as well, are none.

    Raises:
        ValueError, RecursionError: it is no JSON.
    """
    return json.loads(data, parse_constant=_no_number)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def whole(value: Any, what: str, *, below: int = 1 << 63) -> int:
    """``value``, which must be a whole number from 0 to ``below`` - 1; True is none.

    Args:
        what: names it in the message.

    Raises:
        ValueError: it is something else.
    """
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{what} is {str(value)[:40]!r}, no whole number from 0 to {below - 1}")
    return value

"""Damaged and hostile versions of sound inputs, as hypothesis strategies."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

NUMBERS = [
    0, -1, 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**18, 0.5,
    -0.0, 1e308, float("nan"), float("inf"), float("-inf"), True, False,
]  # fmt: skip
WORDS = [
    "", "x", "..", "../../etc/passwd", "/etc/passwd", "a\0b", "\x1b[2J", "\ud800", "9" * 5000,
    "nan", "1e999", "²", "\u0662", "rank-00000.bin", "_target_", "${oc.env:HOME}",
]  # fmt: skip

scalars = st.one_of(
    st.none(), st.sampled_from(NUMBERS), st.sampled_from(WORDS), st.integers(), st.text(max_size=8)
)
hostile = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=5,
)


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        inner = (*path, key)
        found += _places(value, inner) if isinstance(value, dict | list) else [inner]
    return found


@st.composite
def changed(draw: st.DrawFn, tree: Any) -> Any:
    """A JSON value with one to three of its parts replaced, removed or doubled."""
    made = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        places = _places(made)
        if not places:
            break
        *way, last = draw(st.sampled_from(places))
        holder = made
        for key in way:
            holder = holder[key]
        action = draw(st.sampled_from(["replace", "replace", "replace", "remove", "double"]))
        if action == "remove":
            del holder[last]
        elif action == "double" and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[last]))
        else:
            holder[last] = draw(hostile)
    return made


def as_json(tree: Any) -> bytes:
    """NaN and lone surrogates too: json.loads takes both."""
    return json.dumps(tree).encode()


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes with some overwritten, inserted, cut out or cut off."""
    made = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(made)))
        action = draw(st.sampled_from(["flip", "flip", "set", "insert", "cut", "end"]))
        if action == "flip" and at < len(made):
            made[at] ^= 1 << draw(st.integers(0, 7))
        elif action == "set":
            block = draw(st.sampled_from([b"\0" * 8, b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\x80"]))
            made[at : at + len(block)] = block
        elif action == "insert":
            made[at:at] = draw(
                st.sampled_from(
                    [
                        b"\n",
                        b"[" * 5000,
                        b"{",
                        b"NaN",
                        b"1e999",
                        b"9" * 5000,
                        b"\xff\xfe",
                        b"-",
                        b'"',
                    ]
                )
            )
        elif action == "cut":
            del made[at : at + draw(st.integers(1, 64))]
        elif action == "end":
            del made[at:]
    return bytes(made)

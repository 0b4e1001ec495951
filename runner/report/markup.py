"""HTML in which every text is escaped, because nothing but :func:`tag` makes any."""

from __future__ import annotations

import html
from collections.abc import Iterable


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def plain(value: object) -> str:
    """A text without control characters: no file may move a terminal's cursor."""
    return "".join(
        one if one.isprintable() or one in "\n\t" else f"\\x{ord(one):02x}" for one in str(value)
    )


def text(value: object) -> Html:
    """A text as it is read, whatever it holds; control characters are shown as such."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(plain(value), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. ``None`` children and attributes are left out; ``cls`` is ``class``.

    An underscore in an attribute's name stands for a hyphen; True for one without a value.
    """
    told = "".join(
        f" {_name(key)}" if value is True else f' {_name(key)}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    inner = "".join(text(child) for child in children if child is not None)
    return Html(f"<{name}{told}>{inner}</{name}>")


def void(name: str, /, **attributes: object) -> Html:
    """An element without an end."""
    return Html(tag(name, **attributes).removesuffix(f"</{name}>"))


def join(parts: Iterable[object]) -> Html:
    """One after the other."""
    return Html("".join(text(part) for part in parts))


def table(heads: Iterable[object], rows: Iterable[Iterable[object]], **attributes: object) -> Html:
    """A table that scrolls by itself where it is wider than the page."""
    head = tag("tr", *(tag("th", head, scope="col") for head in heads))
    body = join(tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    whole = tag("table", tag("thead", head), tag("tbody", body), **attributes)
    return tag("div", whole, cls="scroll", tabindex="0", role="region")


def _name(key: str) -> str:
    return "class" if key == "cls" else key.replace("_", "-")

"""HTML in which every text is escaped, because only :func:`tag` creates it."""

from __future__ import annotations

import html
from collections.abc import Iterable


class Html(str):
    """Text that is already markup."""

    __slots__ = ()


def plain(value: object) -> str:
    """The text with control characters escaped: no file may control the terminal."""
    return "".join(
        one if one.isprintable() or one in "\n\t" else f"\\x{ord(one):02x}" for one in str(value)
    )


def text(value: object) -> Html:
    """A value as escaped text; control characters are shown as escapes."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(plain(value), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element; ``None`` children and attributes are left out, and ``cls`` means ``class``.

    An underscore in an attribute's name becomes a hyphen; True means an attribute without a value.
    """
    attribute_text = "".join(
        f" {_name(key)}" if value is True else f' {_name(key)}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    inner = "".join(text(child) for child in children if child is not None)
    return Html(f"<{name}{attribute_text}>{inner}</{name}>")


def void(name: str, /, **attributes: object) -> Html:
    """A void element, which has no end tag."""
    return Html(tag(name, **attributes).removesuffix(f"</{name}>"))


def join(parts: Iterable[object]) -> Html:
    """The parts, concatenated."""
    return Html("".join(text(part) for part in parts))


def table(heads: Iterable[object], rows: Iterable[Iterable[object]], **attributes: object) -> Html:
    """A table that scrolls horizontally if it is wider than the page."""
    head = tag("tr", *(tag("th", head, scope="col") for head in heads))
    body = join(tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    element = tag("table", tag("thead", head), tag("tbody", body), **attributes)
    return tag("div", element, cls="scroll", tabindex="0", role="region")


def _name(key: str) -> str:
    return "class" if key == "cls" else key.replace("_", "-")

"""HTML in which every text is escaped, because only :func:`tag` creates it; times and names."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable

from runner.system.units import duration

_KNOWN = ("done", "running", "halted", "failed", "crash", "halt", "silent", "preempted", "redo")


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
    return Html(f"<{name}{attribute_text}>{join(children)}</{name}>")


def join(parts: Iterable[object]) -> Html:
    """The parts, concatenated; ``None`` is left out."""
    return Html("".join(text(part) for part in parts if part is not None))


def table(heads: Iterable[object], rows: Iterable[Iterable[object]]) -> Html:
    """A table that scrolls horizontally if it is wider than the page."""
    names = list(heads)
    head = tag("tr", *(tag("th" if name else "td", name, scope="col") for name in names))
    body = join(tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    label = f"table of {', '.join(str(name) for name in names if name)}"
    element = tag("table", tag("thead", head), tag("tbody", body))
    return tag("div", element, cls="scroll", tabindex="0", role="region", aria_label=label)


def section(cls: str, title: str, *parts: object, **attributes: object) -> Html:
    """A section of the page."""
    return tag("section", tag("h3", title), *parts, cls=cls, **attributes)


def note(words: str) -> Html:
    """A remark in small letters."""
    return tag("p", words, cls="note")


def details(summary: object, *parts: object, **attributes: object) -> Html:
    """Parts that are shown on request."""
    return tag("details", tag("summary", summary), *parts, **attributes)


def legend(entries: Iterable[tuple[Html | str, str]]) -> Html:
    """What each sign means; a sign is an element, or the class of a small one."""
    signs = (
        (sign if isinstance(sign, Html) else tag("span", cls=sign), label)
        for sign, label in entries
    )
    return tag("ul", *(tag("li", sign, label) for sign, label in signs), cls="legend")


def figure(title: str, remark: str, *parts: object, **attributes: object) -> Html:
    """A figure with its title and a remark in small letters."""
    caption = tag("figcaption", title, tag("small", f" {remark}"))
    return tag("figure", caption, *parts, **attributes)


def _name(key: str) -> str:
    return "class" if key == "cls" else key.replace("_", "-")


def when(seconds: float) -> str:
    """Local date and time; empty for 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else ""


def took(seconds: float) -> str:
    """A duration such as 0.7s, 12s or 3m07s."""
    return f"{seconds:.1f}s" if 0 < seconds < 10 else duration(seconds)


def status_class(status: str) -> str:
    """The CSS class of a status or kind."""
    return status if status in _KNOWN else "plain"


def cut(words: str, most: int) -> str:
    """The end of a long name, which says more than its start."""
    return words if len(words) <= most else f"…{words[1 - most :]}"

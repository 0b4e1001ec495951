"""Formats amounts and lists for people."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_SPAN = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


def format_bytes(num_bytes: float) -> str:
    """Bytes in a suitable binary unit, to four digits: ``1.5 MiB``."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1023.5:  # a value that rounds to 1,024 would show as 1.024e+03
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def counted(number: float, noun: str) -> str:
    """1 run, 1,234 runs."""
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """4s, 3m07s, 2h05m, 12d04h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 100 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def first_few(
    values: Sequence[Any],
    most: int = 3,
    *,
    name: Callable[[Any], str] = str,
    between: str = ", ",
    what: str = "",
) -> str:
    """Name the first few, and count the others: "a, b, c and 4 more"."""
    rest = len(values) - most
    return between.join(map(name, values[:most])) + (f" and {rest} more{what}" if rest > 0 else "")


def name_ranks(ranks: Iterable[int], most: int = 8) -> str:
    """rank 3; ranks 0 and 1; ranks 0, 1, 2 and 5 more."""
    numbers = sorted(ranks)
    if 1 < len(numbers) <= most:
        return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
    return f"rank{'s' if len(numbers) > 1 else ''} {first_few(numbers, most)}"


def ranks_on(host: str, hosts: Sequence[str]) -> str:
    """The ranks of a host as ``0-7``, or ``0-3,8`` where they are not consecutive."""
    spans: list[list[int]] = []
    for rank, name in enumerate(hosts):
        if name == host and spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        elif name == host:
            spans.append([rank, rank])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in spans)


def ranks_in(spans: str) -> set[int]:
    """Inverse of :func:`ranks_on`; what is no span is passed over."""
    found = _SPAN.findall(spans)
    return {rank for first, last in found for rank in range(int(first), int(last or first) + 1)}

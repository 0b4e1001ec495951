"""Keys of other trainers: ``foreign_keys.yaml`` says what each is here.

Nothing is renamed silently: a value may have another unit.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import yaml


@cache
def answers() -> dict[str, str]:
    """What each known key of another trainer is here, those of one answer side by side."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return {name: ours for ours, names in table.items() for name in names.split()}


def our_key(key: str) -> str | None:
    """What a key of another trainer is here; None for one that is not in the table."""
    return answers().get(key.lower().replace("-", "_"))


def likely_keys(key: str, ours: Iterable[str]) -> list[str]:
    """What a key in neither table most probably is here: one answer where it is plain, else two.

    A word counts by how few answers have it (inverse document frequency). An answer's score is the
    share of the typed words that any of its names has, and the best match with one of its names.
    """
    names: dict[str, set[str]] = {}
    for name, answer in answers().items():
        names.setdefault(answer, set()).add(name)
    for name in ours:
        same = (answer for answer in names if re.match(rf"{re.escape(name)}\b(?!\.)", answer))
        names.setdefault(next(same, name), set()).add(name)
    words = {answer: set().union(*map(_words, of)) for answer, of in names.items()}
    counts = Counter(itertools.chain.from_iterable(words.values()))

    def weight(some: set[str]) -> float:
        return sum(math.log(len(names) / counts.get(word, 1)) for word in some)

    def score(answer: str) -> float:
        one = max(weight(typed & _words(n)) / weight(typed | _words(n)) for n in names[answer])
        leaf = key.lower().rpartition(".")[2] in names[answer]
        return weight(typed & words[answer]) / weight(typed) + one + leaf / 2

    typed = _words(key)
    best, second = sorted(names, key=score, reverse=True)[:2]
    if score(best) < 0.5:
        return []
    return [best] if score(best) > 1.4 or score(second) < 0.5 else [best, second]


def _words(key: str) -> set[str]:
    """Its words, cut so that ``validation`` is ``valid`` and ``gradient`` is ``grad``."""
    return {word[:4] for word in re.split(r"[._-]", key.lower()) if word}

"""Keys of other trainers: ``foreign_keys.yaml`` says what each is here, by its name or its words.

Nothing is renamed silently: a value may have another unit.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

_MARKS = "~^?"  # of a rule; a name has none
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class _Rule(NamedTuple):
    mark: str
    words: frozenset[str]
    ours: str


@cache
def answers() -> dict[str, str]:
    """What each known name of another trainer is here, those of one answer side by side."""
    return {name: ours for name, ours in _entries() if name[0] not in _MARKS}


def our_key(key: str) -> str | None:
    """What a key of another trainer is here; None for one whose name is not in the table."""
    name, leaf = key.lower().replace("-", "_"), key.rpartition(".")[2]
    if words(leaf) == words(key):  # its group says nothing
        name = name.rpartition(".")[2]
    return answers().get(name) or _named().get(words(key))


def likely_key(key: str) -> str | None:
    """What a key is here by its words, a misspelt one too; None if none of them tells."""
    misspelt = one_slip(key, answers()) if len(key) > 5 else []
    return answers()[misspelt[0]] if misspelt else _by_words(_spelled(key))


@cache
def words(key: str) -> frozenset[str]:
    """The words of a key that count, in one form for all that mean the same."""
    return frozenset(_in_order(key)) or frozenset(_split(key))


def one_slip(typed: str, names: Iterable[str]) -> list[str]:
    """Up to three names from which ``typed`` differs by one slip of the hand: a letter missed,
    doubled, swapped with the next, or taken for its neighbour."""
    cutoff = 1 - 1.01 / max(len(typed), 3)
    alike = [name for name in names if abs(len(name) - len(typed)) < 2]
    return difflib.get_close_matches(typed, alike, n=3, cutoff=cutoff)


@cache
def _table() -> Any:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def _entries() -> Iterator[tuple[str, str]]:
    for ours, names in _table()["answers"].items():
        yield from ((name, ours) for name in names.split())


@cache
def _same() -> dict[str, str]:
    return {word: one for one, all_of in _table()["same"].items() for word in all_of.split()}


@cache
def _rules() -> list[_Rule]:
    return [_Rule(n[0], words(n[1:]), ours) for n, ours in _entries() if n[0] in _MARKS]


@cache
def _named() -> dict[frozenset[str], str]:
    rules = {rule.words: rule.ours for rule in _rules() if rule.mark != "?"}
    names = {words(name): name for name in reversed(answers())}
    # One word of several is too little: of ``train_file`` only ``dir`` is left.
    told = {of for of, name in names.items() if len(of) > 1 or len(_split(name)) == 1}
    # Nor do words tell that two names share: every_n_train_steps and update_freq.
    told -= {
        words(name) for name, ours in answers().items() if answers()[names[words(name)]] != ours
    }
    return rules | {of: answers()[name] for of, name in names.items() if of in told}


def _by_words(key: str) -> str | None:
    *groups, name = key.split(".")
    deciding = _best(key, [rule for rule in _rules() if rule.mark == "^"])
    named = answers().get(name) or _named().get(words(name)) if len(_split(name)) > 1 else None
    if deciding or named:
        return deciding or named
    telling = [group for group in groups if {*_in_order(group)} - {"eval"}]
    nearest = [name, ".".join([*telling[-1:], name]), key]
    strong = [rule for rule in _rules() if rule.mark != "?"]
    found = (_best(some, rules) for rules in (strong, _rules()) for some in nearest)
    return next(filter(None, found), None)


def _best(key: str, rules: Iterable[_Rule]) -> str | None:
    """What the rule that fits best says: of several words, and of those that stand last."""
    typed = _in_order(key)
    fit = [rule for rule in rules if rule.words.issubset(typed)]
    if len(typed) > 3 and "." not in key:  # one of so many words says too little, but the last
        fit = [
            r for r in fit if len(r.words) > 1 or r.mark == "^" or {typed[0], typed[-1]} & r.words
        ]

    def rank(rule: _Rule) -> tuple[bool, int, bool, list[int]]:
        places = sorted(map(typed.index, rule.words), reverse=True)
        return rule.mark != "?", len(places), "eval" in rule.words, places

    return max(fit, key=rank).ours if fit else None


def _in_order(key: str) -> list[str]:
    return [one for word in _split(key) if (one := _same().get(word, word))]


def _split(key: str) -> list[str]:
    plain = re.sub("learn(ing)?_?rate", "lr", _HUMP.sub("_", key).lower()).replace("init_args", "")
    apart = re.split(r"[^a-z0-9]+", re.sub(r"ies(?![a-z0-9])", "y", plain))
    return [re.sub(r"(?<=[a-z0-9]{3})(?<!s)s$", "", word) for word in apart if word]


@cache
def vocabulary() -> list[str]:
    """The words that the table knows."""
    known = frozenset[str]().union(*(words(name.lstrip(_MARKS)) for name, _ in _entries()))
    return sorted({*known, *_same()})


def _spelled(key: str) -> str:
    """A key with each unknown word replaced by the known one that it contains or misspells."""
    return ".".join("_".join(map(_right, _split(part))) for part in key.split("."))


def _right(word: str) -> str:
    known = vocabulary()
    if word in known or len(word) < 4:
        return word
    for at in range(4, len(word) - 3):
        if {word[:at], word[at:]}.issubset(known):  # clipnorm
            return f"{word[:at]}_{word[at:]}"
    within = [one for one in known if len(one) > 4 and word.startswith(one)]  # prefetcher
    within += [one for one in known if len(one) > 5 and word.endswith(one)]  # torchcompile
    if within:
        return max(within, key=len)
    # Of a short word only two swapped letters: any other slip makes one word of another.
    alike = one_slip(word, known) if len(word) > 5 else known
    meant = (one for one in alike if one[0] == word[0])
    return next((one for one in meant if len(word) > 5 or sorted(one) == sorted(word)), word)

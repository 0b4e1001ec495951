"""What to say of a key that does not exist: which of ours it may be, or that there is none."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from runner.config.foreign_keys import likely_key, one_slip, our_key, vocabulary, words

_IN_ITS_GROUP = 0.85  # likeness of whole keys, of which the group is right


def answer(key: str, ours: Sequence[str]) -> str:
    """One of our keys by a slip or in another group, or what another trainer's key is here."""
    group, _, ending = key.rpartition(".")
    same, theirs = _of_ending(key, [ending], ours), our_key(key)
    # In a group of ours that lacks it: ``schedule.lr`` may be meant for ``optim.lr``.
    other = [name for name in same if group in _groups(ours)]
    alike = [name for name in ours if words(name) == words(key) or _bare(name) == _bare(key)]
    if words(ending) == words(key):  # its group, if any, says nothing
        alike = alike or same
    if alike and not any(name in (theirs or "") for name in alike):
        said = did_you_mean(alike)
    elif theirs:
        said = _here("here", theirs, [name for name in other if "." in name])
    elif near := _near(key, ours):
        said = did_you_mean(near)
    elif theirs := likely_key(key):
        said = _here("perhaps", theirs, other)
    elif same := same or _of_ending(key, one_slip(ending, _endings(ours)), ours):
        said = did_you_mean(same)
    else:
        where = f"no setting of {group}" if group in _groups(ours) else "no setting here"
        said = f"{where} is like it; a model, data set or loop of your own may have any."
    return f"unknown key {key!r}. {said[0].upper()}{said[1:]} `--help all` lists all keys."


def suggestion(key: str, known: Collection[str]) -> str:
    """``; did you mean ...?``, or nothing where nothing is close."""
    close = _of_ending(key, [key.rpartition(".")[2]], known)
    close = close or difflib.get_close_matches(key, known, n=3)
    return f"; {did_you_mean(close)}" if close else ""


def did_you_mean(names: Collection[str]) -> str:
    """The question, without a capital letter."""
    return f"did you mean {' or '.join(names)}?"


def _here(how: str, theirs: str, other: Sequence[str]) -> str:
    said = [*(name for name in other if name not in theirs), theirs]
    return f"{theirs}." if theirs.startswith("none ") else f"{how}: {'; or '.join(said)}."


def _near(key: str, ours: Sequence[str]) -> list[str]:
    """Our keys that are the typed one but for its spelling or its group, three at most."""
    ending = key.rpartition(".")[2]
    of_group = words(key) - words(ending)
    names = {*ours, *_groups(ours), *(() if of_group else _endings(ours))}
    in_group = f"{_group(key)}." if "." in key else "."  # no name begins with a dot
    # Its first or its last word is missing.
    whole = [name for name in ours if key.startswith(name) and "_" not in ending]  # model.dimension
    last = [n for n in names if n.startswith(in_group) and n.endswith(f"_{ending}")]
    if begun := whole or [*last, *(n for n in names if n.startswith(f"{key}_"))]:
        return _of_ending(key, {name.rpartition(".")[2] for name in begun}, ours)
    if alike := one_slip(key, sorted(names)):
        return [name for one in alike for name in _of_ending(key, [one], ours) or [one]][:3]
    plain = {_bare(name): name for name in ours if key.startswith(f"{_group(name)}.")}
    if alike := difflib.get_close_matches(_bare(key), plain, n=1, cutoff=_IN_ITS_GROUP):
        meant = plain[alike[0]]
        other = words(key) - words(meant)
        if not other or other - {*vocabulary()}:
            return [meant]  # else its words are others, each rightly spelled
    if of_group and (len(words(ending)) == 1 or not of_group <= words(".".join(_groups(ours)))):
        return []  # in a group of theirs it may be anything
    same = [one for one in _endings(ours) if words(one) == words(ending)]
    return _of_ending(key, same or one_slip(ending, _endings(ours)), ours)


def _bare(key: str) -> str:
    return key.replace("_", "").lower()


def _group(key: str) -> str:
    return key.partition(".")[0]


def _groups(ours: Sequence[str]) -> list[str]:
    return sorted({_group(name) for name in ours})


def _endings(ours: Sequence[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in ours})


def _of_ending(key: str, endings: Collection[str], ours: Collection[str]) -> list[str]:
    """Our keys with one of these last parts, the three that are most like ``key``."""
    same = [name for name in ours if name.rpartition(".")[2] in endings]
    return difflib.get_close_matches(key, same, n=3, cutoff=0)

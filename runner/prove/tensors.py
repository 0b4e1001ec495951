"""What is wrong with state that differs: lost, zero, rounded, older, swapped, another rank's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from runner.prove.compare import IN_COMMON, Finding, are_equal, best_copy, finding, same
from runner.prove.record import Entry, Step, Trajectory

Tensors = Mapping[str, Entry]
Settings = Mapping[str, Mapping[str, Any]]
_STEP_KEYS = ("step", "steps", "num_steps")
_MOST = 0.5  # share of what differs that has to fit an explanation


def look_at_state(
    reference: Trajectory, got: Mapping[int, Step], step: int, name: str
) -> Finding | None:
    """Explain a component of :data:`runner.prove.compare.STATE` that differs on some rank."""
    for rank in sorted(got):
        before, now = reference.steps[step][rank], got[rank]
        if name == "options":
            first = reference.steps.get(1, {}).get(rank, Step())
            found = _options(first.options, before.options, now.options, step)
        elif name == "scalers":
            found = _scalers(before.scalers, now.scalers, step)
        else:
            found = _tensors(reference, name, step, rank, now)
        if found:
            where = f"Rank {rank}: {found.sentence}" if rank else found.sentence
            return replace(found, rank=rank, sentence=where)
    return None


def _tensors(reference: Trajectory, name: str, step: int, rank: int, now: Step) -> Finding | None:
    view: Callable[[Step], Tensors] = _copies_of if name == "copies" else attrgetter(name)
    before = reference.steps[step][rank]
    mine, theirs = view(before), view(now)
    if name == "copies":
        mine, theirs = _copies(before, now)
    if name in IN_COMMON:
        mine = {key: entry for key, entry in mine.items() if key in theirs}
        theirs = {key: theirs[key] for key in mine}
    wrong = [key for key in mine if key not in theirs or not same(mine[key], theirs[key])]
    wrong = wrong or [key for key in theirs if key not in mine]
    if not wrong:
        return None
    cause = _CAUSES.get(name, "")
    if name == "state" and are_equal(before.weights, now.weights, 0.0):
        cause = " Weights are equal: the script loads the model, not the optimizer."
    case = _Case(
        name, step, mine, theirs, wrong, cause,
        others={r: view(s) for r, s in reference.steps[step].items() if r != rank},
        past={s: view(r[rank]) for s, r in reference.steps.items() if rank in r},
    )  # fmt: skip
    return case.explain()


@dataclass(frozen=True, slots=True)
class _Case:
    """One rank's tensors that differ.

    Args:
        others: the same of the other ranks.
        past: the same of this rank at all steps of the undisturbed run.
    """

    component: str
    step: int
    expected: Tensors
    got: Tensors
    wrong: Sequence[str]
    cause: str
    others: Mapping[int, Tensors]
    past: Mapping[int, Tensors]

    def explain(self) -> Finding:
        """The first explanation that fits most of what differs."""
        what = f"{_WORDS[self.component]}: {self._names()}"
        kind = self._kind()
        if self.component == "state" and all(_key(key) in _STEP_KEYS for key in self.wrong):
            one = self.wrong[0]
            value = _shown(self.got.get(one))
            words = f"{value}, was {_shown(self.expected.get(one))}"
            rest = ". The step counts are not restored; the bias correction of Adam starts anew."
            return self._say("optimizer_steps", f"{what} {words}{rest}")
        if self._most(lambda key: key not in self.got):
            return self._say(kind, f"{what} missing {self._after()}")
        if self._most(self._is_zero):
            return self._say(kind, f"{what} zero {self._after()}")
        if swapped := self._of_another(what):
            return swapped
        for step, tensors in sorted(self.past.items(), reverse=True):
            if self._most(partial(self._is_held, tensors=tensors)):
                return self._say(*self._older(step, what))
        precision = self._rounded()
        if precision:
            kind = "weights_rounded" if self.component == "weights" else kind
            words = f"rounded to {precision}: the checkpoint holds them in it"
            return self._say(kind, f"{what} {words}.")
        return self._say(kind, f"{what} different {self._after()}")

    def _of_another(self, what: str) -> Finding | None:
        """State of another rank, key or parameter of the same step."""
        for rank, tensors in self.others.items():
            if self._most(partial(self._is_held, tensors=tensors)):
                words = f"those of rank {rank} (step {self.step}): it loads another rank's file."
                return self._say("rank", f"{what} {words}")
        if other := self._other_key():
            words = f"{other} (step {self.step}): it is saved in the place of the other."
            return self._say(self._kind(), f"{what} {words}")
        if self.component in ("state", "weights") and self._most(self._is_anothers):
            words = "those of other parameters: the order of parameters or groups has changed"
            return self._say("param_groups", f"{what} {words}.")
        return None

    def _say(self, kind: str, sentence: str) -> Finding:
        return finding(kind, self.step, sentence, names=self.wrong)

    def _kind(self) -> str:
        return {"state": "optimizer_state", "copies": "ema"}.get(self.component, self.component)

    def _names(self) -> str:
        """``exp_avg of all 148 parameters is``, ``2 of 12 tensors (a, b) are``."""
        if self.component == "state":
            keys = list(dict.fromkeys(_key(key) for key in self.wrong))
            parameters = {key.rpartition("/")[0] for key in self.wrong}
            total = len({key.rpartition("/")[0] for key in {**self.expected, **self.got}})
            count = f"all {total}" if len(parameters) == total else f"{len(parameters)} of {total}"
            of = "the only parameter" if total == 1 else f"{count} parameters"
            return f"{', '.join(keys[:4])} of {of} {_verb(len(keys))}"
        total = len({**self.expected, **self.got})
        if len(self.wrong) == total > 1:
            return f"all {total} tensors are"
        shown = ", ".join(self.wrong[:3]) + (", ..." if len(self.wrong) > 3 else "")
        return f"{len(self.wrong)} of {total} tensors ({shown}) {_verb(len(self.wrong))}"

    def _after(self) -> str:
        return f"after the resume (step {self.step}).{self.cause}"

    def _older(self, step: int, what: str) -> tuple[str, str]:
        if self.component == "copies":
            return "ema", f"{what} those of step {step}: an older file is loaded."
        if step == 1:
            return self._kind(), f"{what} those of step 1: what was saved is not loaded."
        words = f"those after step {step - 1}: an older checkpoint is loaded."
        if self.component == "buffers":
            return "buffers", f"{what} {words}"
        return "older_checkpoint", f"{what} {words}"

    def _most(self, fits: Callable[[str], bool]) -> bool:
        return sum(map(fits, self.wrong)) > _MOST * len(self.wrong)

    def _is_zero(self, key: str) -> bool:
        entry, expected = self.got.get(key), self.expected.get(key)
        return bool(entry and expected and entry[1] == 0 and expected[1])

    def _is_held(self, key: str, tensors: Tensors) -> bool:
        return key in self.got and key in tensors and same(self.got[key], tensors[key])

    def _is_anothers(self, key: str) -> bool:
        """Whether it equals the tensor of another parameter; numbers and zeros tell nothing."""
        entry = self.got.get(key)
        if not entry or not entry[0] or not entry[1] or _key(key) in _STEP_KEYS:
            return False
        named = self.component == "state"
        return any(
            same(entry, other)
            for name, other in self.expected.items()
            if name != key and (not named or _key(name) == _key(key))
        )

    def _other_key(self) -> str:
        """The key of the state that most have in the place of their own."""
        others = {_key(key) for key in self.expected} if self.component == "state" else ()
        for other in sorted(others):
            places = {key: f"{key.rpartition('/')[0]}/{other}" for key in self.wrong}
            held = {k: self.expected[at] for k, at in places.items() if at in self.expected}
            if self._most(partial(self._is_held, tensors=held)):
                return other
        return ""

    def _rounded(self) -> str:
        """The type to which most were rounded."""
        types = Counter(str(self.got[key][2]) for key in self.wrong if len(self.got[key]) > 2)
        types.pop("", None)
        name, count = types.most_common(1)[0] if types else ("", 0)
        return name if count > _MOST * len(self.wrong) else ""


def _verb(count: int) -> str:
    return "is" if count == 1 else "are"


def _key(name: str) -> str:
    return name.rpartition("/")[2]


def _shown(entry: Entry | None) -> str:
    return "missing" if entry is None else f"{entry[1]:g}" if entry[1] is not None else "other"


def _copies_of(step: Step) -> Tensors:
    return {name: entry for copy in step.copies.values() for name, entry in copy.items()}


def _copies(expected: Step, got: Step) -> tuple[Tensors, Tensors]:
    """The first copy that differs, and what is there in its place."""
    for own in expected.copies.values():
        other = best_copy(own, got.copies, 0.0)
        if other != own:
            return own, other or {}
    return {}, {}


_CAUSES = {
    "state": " The optimizer's state is not loaded.",
    "buffers": " The checkpoint lacks them, or they are not loaded.",
    "copies": " The averaged weights (EMA) are not saved, or not loaded.",
    "weights": " They are those of no step of the undisturbed run.",
}
_WORDS = {
    "weights": "Weights",
    "frozen": "Frozen weights",
    "buffers": "Buffers",
    "state": "Optimizer",
    "copies": "A copy of the weights (EMA)",
}


def _options(first: Settings, mine: Settings, theirs: Settings, step: int) -> Finding | None:
    """
    Args:
        first: the options of the undisturbed run's first step.
    """
    wrong = [name for name in mine if theirs.get(name) != mine[name]]
    if not wrong:
        return None
    count = f"{len(wrong)} of {len(mine)} parameters"
    if len(_distinct(mine)) > 1 and _distinct(mine) == _distinct(theirs):
        words = f"Parameter groups are swapped: {count} have the options of another group"
        return finding("param_groups", step, f"{words} (step {step}).", names=wrong)
    before, now = mine[wrong[0]], theirs.get(wrong[0], {})
    keys, changes = _changes(before, now)
    begun = first.get(wrong[0], {})
    rates, of_schedule = {"lr", "initial_lr"}, {k for k in before if begun.get(k) != before[k]}
    if rates & {*keys} and {*keys} <= rates | of_schedule:  # OneCycleLR moves the momentum too
        is_anew = begun.get("lr") == now.get("lr")
        why = "the schedule starts anew" if is_anew else "the schedule is not restored"
        words = f"Learning rate {changes.partition(' ')[2]} (step {step}, {count}): {why}."
        return finding("learning_rate", step, words, names=wrong)
    words = f"Options of {count} differ from step {step} on: {changes}."
    return finding("options", step, words, names=wrong)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], str]:
    """The keys whose values differ, the rate first; ``lr 0.1, was 0.2, eps ...``."""
    ordered = sorted(before, key=lambda key: key != "lr")
    keys = [key for key in ordered if now.get(key) != before[key]]
    pairs = [f"{k} {_number(now.get(k))}, was {_number(before[k])}" for k in keys]
    return keys, ", ".join(pairs)


def _distinct(options: Mapping[str, Any]) -> list[str]:
    return sorted({repr(sorted(one.items())) for one in options.values()})


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _scalers(
    mine: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], step: int
) -> Finding | None:
    if mine == theirs:
        return None
    keys, changes = _changes(mine[0] if mine else {}, theirs[0] if theirs else {})
    words = f"GradScaler: {changes or 'missing'} (step {step}): it is not restored."
    return finding("scaler", step, words, names=keys)

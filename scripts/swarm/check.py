"""What must hold for any run of the runner. A check gives sentences about what does not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.fault.spec import Fault, parse_faults
from runner.system.error import EXIT_CONFIG, EXIT_DONE, EXIT_HALTED, EXIT_NO_CHECKPOINT
from scripts.swarm.case import Case, as_told
from scripts.swarm.check_loop import check_loop, check_script
from scripts.swarm.command import BATCH, STEPS, hangs, layout_of, refused_in
from scripts.swarm.play import (
    TRACEBACK,
    Counter,
    Played,
    crashes,
    journal,
    own,
    play,
    positions,
    tail,
)
from scripts.swarm.twins import Leg, Twins
from tests.run import left_behind, read_lines

_COMPARED = ("step", "cursor", "loss", "grad_norm", "lr", "samples", "eval_loss")
_CAUSES = {
    **{kind: {"hardware, transient"} for kind in ("nan_grad", "nan_loss")},
    # Never a new mix: no fault of a case has later samples like its own.
    **{"poison": {"data"}, "spike": {"data"}},
    **{"sticky": {"hardware, sticky"}, "spoil_state": {"state corrupted"}},
    **{"flip_bit": {"state corrupted"}, "overflow": {"numerics"}},
    # Where the limits did not see the step, what it left is a wrong state.
    "flip_grad": {"hardware, transient", "state corrupted"},
    "misread": {"read wrongly once", "state corrupted"},
}
_OPEN = {"not reproducible", "unclear"}
_SILENT = ("wrong", "wrong_grad", "flip_bit", "mismatch")
_NAN = ("nan_grad", "nan_loss", "poison", "sticky")
# What one more computation, a restart or nothing at all mends: never a reason to halt.
_PASSING = (
    *("nan_grad", "nan_loss", "misread", "slow", "oom", "wrong_product", "corrupt_snapshots"),
    *("kill", "abort", "raise", "stop", "hang", "no_break"),
    *("skip_collective", "other_collective", "other_shape"),
)


def check(case: Case, folder: Path, twins: Twins, shared: Path, counter: Counter) -> list[str]:
    """Play the case and say what is wrong with it; an empty list is a pass."""
    if not case.is_runner:
        return (check_loop if case.where == "loop" else check_script)(case, folder, counter)
    cache = f"data.cache={folder / 'cache'}"
    played = play(case, folder / "run", shared, counter, lambda _: [cache])
    wrong = [*_ends(case, played), *_stops(case, played)]
    if wrong or played.last.code == EXIT_CONFIG:
        counter.refused += not wrong
        return wrong
    wrong += [*_named(case, played), *_ledger(case, played), *_audits(case, played)]
    wrong += _settled(case, played)
    if not wrong and played.last.code == EXIT_DONE:
        wrong += _same_as_told(case, played, twins)
    return wrong


def _ends(case: Case, played: Played) -> Iterator[str]:
    """Done, or refused in a sentence; in time; with nothing left behind."""
    if any(start.has_hung for start in played.starts):
        yield f"hung: start {len(played.starts)} did not end: {tail(played.last.text)}"
    elif pids := left_behind(played.out):
        yield f"left: processes {pids}"
    else:
        yield from _ending(case, played)


def _ending(case: Case, played: Played) -> Iterator[str]:
    last, number = played.last, len(played.starts)
    words = refused_in(case, number - 1)
    if last.code == EXIT_CONFIG:
        if not words or words not in last.text:
            yield f"refused: at start {number}: {tail(last.text)}"
    elif words:
        yield f"accepted: with {last.code} at start {number}, to be refused: {words}"
    elif last.code == EXIT_DONE:
        if last.summary.get("status") != "done":
            yield f"ended: with 0, status {last.summary.get('status')}"
        if played.left:
            yield f"left: in shared memory {played.left[:3]}"
    elif last.code == EXIT_NO_CHECKPOINT and any("corrupt_ch" in fault for fault in case.faults):
        return  # the damaged one may be the only one that is proven
    elif last.code != EXIT_HALTED:
        word = "crashed" if TRACEBACK in own(last.text) else "ended"
        yield f"{word}: with {last.code} at start {number}: {tail(last.text)}"
    elif not case.sick and all(fault.kind in _PASSING for fault in _faults(case)):
        yield f"halted: without a fault that lasts: {tail(last.text)}"


def _stops(case: Case, played: Played) -> Iterator[str]:
    """What was asked to stop has saved its last applied step, and says so."""
    for number, start in enumerate(played.starts):
        if start.broken not in ("term", "int", "notice"):
            continue
        is_late = "did not end within preempt.grace_seconds" in start.text
        if is_late and not hangs(case):  # no summary is left then
            yield f"lost: asked to stop at {case.breaks[number].at}: {tail(start.text)}"
        if not start.summary:
            continue
        if case.breaks[number].at.partition(":")[0] in ("start", "tokenise", "finish") or crashes(
            case
        ):
            continue
        status = start.summary.get("status")
        if status == "preempted" and "saved at step" not in str(start.summary.get("reason")):
            yield f"lost: asked to stop at {case.breaks[number].at}: {start.summary['reason']}"
        elif status not in ("preempted", "done", "halted"):
            yield f"stopped: status {status} with {start.code}: {tail(start.text)}"


def _faults(case: Case) -> tuple[Fault, ...]:
    return parse_faults(case.faults)


def _named(case: Case, played: Played) -> Iterator[str]:
    """No cause is named that no fault of the case has, nor a rank that has none."""
    kinds = {fault.kind for fault in _faults(case)}
    allowed = set(_OPEN).union(*(_CAUSES.get(kind, set()) for kind in kinds))
    if case.late and "overflow" in kinds:
        # Read a step later, the last of its steps is computed again where it is over.
        allowed.add("hardware, transient")
    ranks = {fault.rank for fault in _faults(case)}
    if case.sick:
        allowed.add("hardware, sticky")
        ranks |= {int(rank) for rank in case.sick.partition("ranks=")[2].split("+")}
    if any(layout_of(case, start)[0] == "hsdp" for start in range(len(played.starts))):
        # An update that is not element by element carries a spoilt part into the whole copy.
        spoilt = {f.rank for f in _faults(case) if f.kind == "spoil_state" and f.rank is not None}
        ranks |= {rank ^ 1 for rank in spoilt}
    for line in journal(played.out):
        cause = (line.get("detail") or {}).get("cause")
        if not isinstance(cause, dict):
            continue
        if cause["cause"] not in allowed:
            yield f"cause: step {line['step']} is called {cause['cause']}: {cause['why'][:300]}"
        if None not in ranks and set(cause["ranks"]) - ranks:
            yield f"cause: ranks {cause['ranks']} are named: {cause['why'][:300]}"


def _ledger(case: Case, played: Played) -> Iterator[str]:
    """Only what was bad is skipped: the samples where replays told them, else near bad steps."""
    skipped = positions(played.last.summary.get("skipped", []))
    bad = {p for fault in _faults(case) for p in range(*fault.samples)}
    lines = journal(played.out)
    exact, around = set[int](), set[int]()
    for line in lines:
        detail = line.get("detail") or {}
        if line["kind"] == "redo":
            exact |= {int(p) for p in detail.get("skipped", [])}
        elif line["kind"] in ("discard", "rollback", "rebaseline") and line.get("samples"):
            first, stop = line["samples"]
            around |= set(range(first - 2 * BATCH, stop + 2 * BATCH))
    if innocent := sorted(exact - bad):
        yield f"ledger: {len(innocent)} innocent samples by a verdict: {innocent[:10]}"
    if innocent := sorted(skipped - exact - around):
        yield f"ledger: nothing tells why these are skipped: {innocent[:10]}"
    blamed = [line for line in lines if line["kind"] in ("discard", "rollback")]
    if blamed and not case.faults and not case.sick:
        yield f"ledger: a {blamed[0]['kind']} without a fault: {blamed[0]['reason'][:300]}"


def _settled(case: Case, played: Played) -> Iterator[str]:
    """What a device that is proven bad computes never becomes the new level."""
    lines = journal(played.out)
    if case.sick and any("hardware, sticky" in str(line) for line in lines):
        for line in (line for line in lines if line["kind"] == "rebaseline"):
            yield f"settled: on a device that is proven bad: {line['reason'][:300]}"


def _audits(case: Case, played: Played) -> Iterator[str]:
    """An audit names the rank that computes wrongly, and no other; if it can, within two."""
    wrong = [fault for fault in _faults(case) if fault.kind in ("wrong", "wrong_grad")]
    lines = [line for line in journal(played.out) if line["kind"] == "audit"]
    ranks = {fault.rank for fault in wrong}
    # A start whose rank was wrong from the beginning has nothing to compare it with.
    is_alone = len(wrong) == len(case.faults) == 1 and not case.breaks and not case.sick
    is_alone = is_alone and (case.ranks > 2 or wrong[0].steps[0] > 1)
    has_trouble = bool(case.sick) or any(f.kind in ("sticky", "spoil_state") for f in _faults(case))
    for line in lines:
        if not wrong and not has_trouble and "flip_bit" not in {f.kind for f in _faults(case)}:
            yield f"audit: without a fault: {line['reason'][:300]}"
        elif not set(line["ranks"]) >= ranks or (is_alone and set(line["ranks"]) != ranks):
            yield f"audit: names {line['ranks']}, not {ranks}: {line['reason'][:300]}"
    is_due = is_alone and case.audit and case.ranks > 1 and played.last.code == EXIT_DONE
    is_due = is_due and not case.stop_after
    if is_due and not lines and wrong[0].steps[0] + 2 * case.audit < STEPS:
        yield f"audit: {wrong[0].text} was not found in {STEPS} steps"


def _is_compared(case: Case, played: Played) -> bool:
    """Whether the end is told to be that of the undisturbed run."""
    lines = journal(played.out)
    skipped = positions(played.last.summary.get("skipped", []))
    trouble = [line for line in lines if line["kind"] in ("redo", "discard", "rollback")]
    # Bad samples explain trouble beside another fault, which may be too small to be seen.
    bad = {p for one in _faults(case) if one.samples != (0, 0) for p in range(*one.samples)}
    unexplained = {
        line["step"] for line in trouble if not bad & set(range(*(line["samples"] or (0, 0))))
    }
    for line in lines:
        cause = (line.get("detail") or {}).get("cause")
        if line["kind"] in ("rebaseline", "micro_size") or (
            isinstance(cause, dict) and cause["remedy"] == "widen"
        ):
            return False
    if case.sick and max(counted(played.out), default=0) >= _sick_from(case):
        return False  # steps of a device that is wrong by less than the limits were applied
    for fault in _faults(case):
        if fault.kind in _SILENT:
            return False
        if fault.samples != (0, 0) and fault.kind not in _NAN:
            if (
                not set(range(*fault.samples)) & set(range(played.last.summary["cursor"]))
                <= skipped
            ):
                return False
        elif fault.kind in ("flip_grad", "misread", "spoil_state") and not any(
            fault.steps[0] <= step <= fault.steps[0] + 3 for step in unexplained
        ):
            return False  # too small to be seen
    return True


def _sick_from(case: Case) -> int:
    return int(case.sick.partition("step=")[2].partition(",")[0])


def _legs(case: Case, played: Played) -> list[Leg] | None:
    """Starts whose settings differ from the one before, and how far each is to go."""
    lines = journal(played.out)
    # What each start went on from: that of the next one, where it ended before it was journalled.
    resumed = [line["step"] for line in lines if line["kind"] == "start"]
    begun = [not _is_preparing(case, played, number) for number in range(len(played.starts))]
    legs = [Leg(0, STEPS, STEPS)]
    for number, one in enumerate(case.breaks, start=1):
        if number >= len(played.starts) or not (one.ranks or one.engine or one.weights):
            continue
        if len(resumed) != sum(begun):
            return None  # another start ended before it was journalled
        journalled = sum(begun[:number])
        at = resumed[journalled]
        if at == 0 and one.weights:
            return None
        back = [line for line in lines if line["kind"] == "rollback"]
        if back or any(step < at for step in resumed[journalled + 1 :]):
            return None
        # New weights hold from where the run had got, which may be behind the checkpoint.
        before = played.starts[number - 1]
        reached = max(at, before.steps) if one.weights else at
        if one.weights and _is_found_again(played, journalled, before.cursor):
            return None
        legs[-1] = Leg(legs[-1].start, at, reached)
        legs = [leg for leg in legs if leg.stop > 0]
        if legs and legs[-1].stop <= (legs[-2].stop if len(legs) > 1 else 0):
            legs.pop()
        legs.append(Leg(number, STEPS, STEPS))
    return legs


def _is_preparing(case: Case, played: Played, start: int) -> bool:
    """Whether a start was ended while its data was prepared."""
    return bool(played.starts[start].broken) and case.breaks[start].at.startswith("tokenise:")


def _is_found_again(played: Played, start: int, cursor: int) -> bool:
    """Whether a start with new weights skips what the one before had read with the old ones.

    A twin that is told of it beforehand gets its new weights from behind it.
    """
    lines = journal(played.out)
    starts = [index for index, line in enumerate(lines) if line["kind"] == "start"]
    return any(
        line["kind"] in ("discard", "redo") and line["samples"] and line["samples"][0] < cursor
        for line in lines[starts[start] :]
    )


def counted(out: Path) -> dict[int, dict[str, Any]]:
    """Step to what is compared of its last applied line."""
    lines = read_lines(out / "metrics.jsonl")
    return {
        line["step"]: {key: line[key] for key in _COMPARED if line.get(key) is not None}
        for line in lines
        if line["action"] == "apply"
    }


def _same_as_told(case: Case, played: Played, twins: Twins) -> Iterator[str]:
    legs = _legs(case, played)
    if legs is None or not _is_compared(case, played):
        return
    skipped = played.last.summary["skipped"]
    undisturbed = replace(as_told(case), breaks=case.breaks)
    if case.seed % 2 and not case.stop_after:  # every other twin does not even evaluate
        undisturbed = replace(undisturbed, evaluate=0)
    twin = twins.of(undisturbed, legs, skipped)
    if twin.last.code != EXIT_DONE:
        yield f"told: the twin ended with {twin.last.code}: {tail(twin.last.text)}"
        return
    mine, theirs = counted(played.out), counted(twin.out)
    for step in sorted(mine.keys() | theirs.keys()):
        one, other = mine.get(step, {}), theirs.get(step, {})
        keys = _differing(one, other)
        if keys:
            shown = {key: (one.get(key), other.get(key)) for key in keys}
            yield f"told: step {step} differs from the undisturbed run's: {shown}"
            return
    if played.last.summary["state_digest"] != twin.last.summary["state_digest"]:
        yield "told: the state differs from the undisturbed run's, all steps are equal"


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    if not one or not other:
        return ["step"]
    return sorted(key for key in one.keys() & other.keys() if one[key] != other[key])


def kind_of(wrong: Sequence[str]) -> str:
    """The word that failures of one kind begin with."""
    return re.split(r"[:]", wrong[0])[0] if wrong else ""

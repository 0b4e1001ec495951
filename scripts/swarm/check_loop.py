"""What must hold for a loop with a guard or a ring, against the same loop without."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from runner.system.error import EXIT_CONFIG, EXIT_DONE, EXIT_HALTED, EXIT_PREEMPTED
from runner.system.json_lines import read_lines
from scripts.swarm.case import Case
from scripts.swarm.command import layout_of
from scripts.swarm.loop import EVERY, numbers
from scripts.swarm.play import Counter, Played, goes_on, journal, play_loop, positions, tail
from tests.run import left_behind
from tests.script_run import ends_of


def check_loop(case: Case, folder: Path, counter: Counter) -> list[str]:
    out = folder / "loop"
    played = play_loop(case, out, "guarded", counter)
    last = played.last
    if last.has_hung:
        return [f"hung: start {len(played.starts)}: {tail(last.text)}"]
    if pids := left_behind(out):
        return [f"left: processes {pids}"]
    if last.code != EXIT_DONE:
        wrong = list(_refusal(case, played))
        counter.refused += last.code == EXIT_CONFIG and not wrong
        return wrong
    wrong = list(_loop_stops(case, played))
    if case.mirror and not case.ring_alone:
        return [*wrong, "accepted: memory_mirror, which no loop has"]
    if len(played.ended) != layout_of(case, len(played.starts) - 1)[1]:
        codes = [start.code for start in played.starts]
        return [f"ended: with {codes}, {len(played.ended)} ranks have an end: {tail(last.text)}"]
    skipped = played.ended[0].get("skipped", [])
    (out / "skipped.json").write_text(json.dumps(skipped))
    plain = play_loop(case, out, "plain", counter)
    if plain.last.code != EXIT_DONE:
        return [*wrong, f"the plain loop ended with {plain.last.code}: {tail(plain.last.text)}"]
    if len({layout_of(case, start)[1] for start in range(len(played.starts))}) > 1:
        wrong += _about_equal(case, played, plain)
    elif not _begins_otherwise(case, out / "run", skipped):
        wrong += _equal(played, plain, skipped)
    if not case.ring_alone:
        wrong += _logged(case, played, plain)
        bad, large = (
            sorted({n for one in plain.ended for n in one[key]}) for key in ("bad", "large")
        )
        back = [line["samples"] for line in journal(out / "run") if line["kind"] == "rollback"]
        wrong += _loop_ledger(case, positions(skipped), positions(back), bad, large)
    return wrong


def _begins_otherwise(case: Case, run: Path, skipped: Sequence[Sequence[int]]) -> bool:
    """Whether the first step is not the process's first, in which DDP adds in another order."""
    if case.engine != "ddp" or case.ranks <= 2:
        return False
    back = [line["decision"] for line in journal(run) if line["kind"] == "rollback"]
    return 0 in positions(skipped) or any(what.startswith("back to step 0,") for what in back)


def _equal(played: Played, plain: Played, skipped: Sequence[object]) -> Iterator[str]:
    for rank, (mine, theirs) in enumerate(zip(played.ended, plain.ended, strict=True)):
        keys = [k for k, v in mine["digests"].items() if v != theirs["digests"][k]]
        if keys:
            yield f"plain: rank {rank}: {keys} differ from the loop that skips {skipped}"
            return


def _about_equal(case: Case, played: Played, plain: Played) -> Iterator[str]:
    """On other ranks the same samples are added in another order, and dropout is another."""
    mine, theirs = played.ended[0]["loss"], plain.ended[0]["loss"]
    is_alike = case.precision == "fp32" and not {"dropout", "batchnorm"} & {*case.model}
    if is_alike and abs(mine - theirs) > 1e-3 * case.units:
        yield f"plain: a loss of {mine} at the end, {theirs} on the first number of ranks"


def check_script(case: Case, folder: Path, counter: Counter) -> list[str]:
    """A script of another framework, or nanoGPT's loop: poisoned and killed as if told to skip."""
    counter.add()
    is_own = case.where == "nano"
    words = [*([] if is_own else [case.where]), str(folder), "poison", "told"]
    kill_at = case.breaks[0].at.partition(":")[2] if case.breaks else "-1"
    script = "nano_script.py" if is_own else "frameworks.py"
    try:
        ends = ends_of(script, folder, *words, restarts=1, KILL_AT=kill_at)
    except AssertionError as error:
        return [f"ended: {tail(str(error))}"]
    if any(end["poison"] != end["told"] for end in ends):
        return [f"plain: {case.where}: the run that was told to skip ends otherwise"]
    return []


def _refusal(case: Case, played: Played) -> Iterator[str]:
    """What is not a halt for bad data, nor a refusal of draws that cannot be read again."""
    last, number = played.last, len(played.starts)
    if case.mirror and last.code == EXIT_CONFIG:
        if "snapshots stay on their own node" not in last.text:
            yield f"refused: at start {number}: {tail(last.text)}"
    elif last.code == EXIT_CONFIG and "refused: ConfigError" in last.text:
        if number > 1 or "generator" not in last.text or case.data not in ("windows", "shuffled"):
            yield f"refused: at start {number}: {tail(last.text)}"
    elif last.code != EXIT_HALTED or not case.bad:
        yield f"ended: with {last.code} at start {number}: {tail(last.text)}"


def _loop_stops(case: Case, played: Played) -> Iterator[str]:
    for start in played.starts:
        is_right = start.code in (EXIT_PREEMPTED, EXIT_DONE) or goes_on(start.text)
        if start.broken == "term" and not case.ring_alone and not is_right:
            yield f"stopped: with {start.code}: {tail(start.text)}"


def _logged(case: Case, played: Played, plain: Played) -> Iterator[str]:
    """A step's metric of its own is the mean over the batches of that step, on all ranks."""
    lines, _ = read_lines(played.out / "run" / "metrics.jsonl")
    mine = {line["step"]: line.get("read") for line in lines if line["action"] == "apply"}
    for step, parts in enumerate(zip(*(one["logged"] for one in plain.ended), strict=True), 1):
        total, count = (sum(of) for of in zip(*parts, strict=True))
        theirs = total / count if case.logs else None
        if mine.get(step) != theirs:
            yield f"logged: step {step} has {mine.get(step)}, the plain loop {theirs}"
            return


def _loop_ledger(
    case: Case, gone: Set[int], rolled_back: Set[int], bad: Sequence[int], large: Sequence[int]
) -> Iterator[str]:
    """Bad batches are skipped, and no others but in their steps and those a rollback takes.

    ``large`` ones may be: with which memory ran out, if rank 0 had them then.
    """
    if (
        case.data == "windows"
        and case.accumulate > 1
        and {"dropout", "eval_drop"} & set(case.model)
    ):
        return  # a step's later batches are drawn after its dropout: the plain loop has others
    if missed := sorted(set(bad) - gone):
        yield f"ledger: bad batches {missed} were used"
    # A loader that only gives batches goes on behind a rollback: all since the checkpoint is gone.
    reach = 2 * case.accumulate
    if case.data in ("own", "windows", "shuffled"):
        reach += (EVERY + 4) * case.accumulate
    given = numbers(case)
    reach += sum(given.get(name, 0) for name in ("margin", "ahead", "back")) * case.accumulate
    innocent = gone - (rolled_back if rolled_back & set(bad) else set())
    known = [*bad, *large]
    if far := [n for n in sorted(innocent) if not any(abs(n - b) <= reach for b in known)]:
        yield f"ledger: innocent batches {far} are skipped; bad are {list(bad)}"

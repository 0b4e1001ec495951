"""Counts how often the cause of a bad step is named rightly, on real ranks.

    python -m scripts.explain_trials [--only fsdp] [--rounds N] [--page docs/explaining-trials.md]

For each layout a small run is started and trained for 33 steps. Then one incident after the other
is made in it: the state is put back, a fault is armed, and the run's own loop is left to find out.
What the journal says is compared with what was done. The kinds on which the rules were tuned and
those on which they were not are told apart.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runner.config.compose import compose
from runner.distributed.env import place_from
from runner.fault.inject import Overflow
from runner.fault.spec import parse_faults
from runner.fault.wrap import _overflowing
from runner.policy.decision.history import Incident
from runner.session.group import join
from runner.session.phases import Run
from runner.session.session import open_run
from runner.system.error import RunnerError
from runner.train.rehearsal import _Kept

START = 33  # updates before the first incident; clean checkpoints are of 10 and 20
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "fsdp, 2 ranks": (2, ()),
    "fsdp, 3 ranks, BF16": (3, ("model.precision=bf16",)),
    "fsdp, 4 ranks": (4, ()),
    "zero2, 2 ranks, BF16": (2, ("parallel=zero2", "model.precision=bf16")),
}
ALIKE = (
    *("model=tiny", "model.precision=fp32", "data=synthetic", "data.workers=0", "eval.every=0"),
    *("steps=400", "schedule.warmup=5", "checkpoint.every=10", "checkpoint.clean_after=5"),
    *("guard.min_history=10", "track.every=100000", "parallel.timeout_seconds=60"),
    *("explain=full", "guard.max_rollbacks=100", "guard.max_discards=100", "track.read=false"),
    "faults=[slow@step=1000000,seconds=0]",  # so that the faults' wrappers are there
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is done, and what is right. ``modules`` are all that may be named."""

    kind: str
    tuned: bool
    cause: str
    faults: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    module: str = ""
    step: int | None = None
    rate: float = 1.0
    hooks: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Told:
    """What came of a trial."""

    kind: str
    tuned: bool
    right: str
    said: str = "nothing"
    is_wrong_name: bool = False
    is_complete: bool = False  # the name that was to be given was given
    steps: int = 0
    layout: str = ""
    detail: dict[str, Any] = field(default_factory=dict)


def trials(world: int, batch: Sequence[int], dice: random.Random) -> Iterator[Trial]:
    """One of each kind, on ranks, samples of the next batch and modules drawn anew."""
    rank, now = dice.randrange(world), START + 1
    one, two = sorted(dice.sample(batch, 2))
    cursor, whole = batch[0], f"{batch[0]}-{batch[-1]}"
    module = dice.choice(
        ["embedding", "norm", *(f"blocks.{n}.{m}" for n in (0, 1) for m in ("attention", "ffn"))]
    )
    at = f"step={now},rank={rank}"
    transient = partial(Trial, cause="hardware, transient", ranks=(rank,))
    for kind in ("nan_loss", "nan_grad", "flip_grad"):
        yield transient(kind=kind, tuned=True, faults=(f"{kind}@{at}",))
    yield transient(kind="an activation x 1e6 once", tuned=False, hooks=("once",))
    misread = transient(kind="misread", tuned=True, faults=(f"misread@{at}",))
    yield replace(misread, cause="read wrongly once")
    sticky = partial(Trial, cause="hardware, sticky", ranks=(rank,))
    yield sticky(kind="sticky NaN", tuned=True, faults=(f"sticky@{at}",))
    yield sticky(kind="a rank's activations x 1e3", tuned=False, hooks=("always",))
    data = partial(Trial, cause="data")
    poison = f"poison@samples={one}"
    yield data(kind="one NaN sample", tuned=True, positions=(one,), faults=(poison,))
    loud = f"spike@samples={two},scale={dice.choice([60, 200, 1000])}"
    yield data(kind="one loud sample", tuned=True, positions=(two,), faults=(loud,))
    both = (poison, f"spike@samples={two},scale=300")
    yield data(kind="NaN and loud", tuned=True, positions=(one, two), faults=both)
    many = tuple(sorted(dice.sample(batch, 20)))
    loud_all = tuple(f"spike@samples={p},scale=4" for p in many)
    yield data(kind="20 of 32, mildly", tuned=False, positions=many, faults=loud_all)
    yield Trial(kind="overflow", tuned=True, cause="numerics", module=module, hooks=("overflow",))
    yield Trial(
        kind="x 1e4 in the run's precision", tuned=False, cause="numerics", module=module,
        hooks=("scaled",),
    )  # fmt: skip
    state = partial(Trial, cause="state corrupted", step=now)
    yield state(kind="a weight's bit", tuned=True, faults=(f"spoil_state@{at}",))
    yield state(kind="a matrix x 50", tuned=True, hooks=("matrix",))
    yield state(kind="second moments x 1e-6", tuned=False, hooks=("moments",))
    yield Trial(
        kind="rate too high", tuned=True, cause="rate", rate=dice.choice([100.0, 300.0, 1000.0])
    )
    yield Trial(
        kind="hard batch", tuned=True, cause="healthy", faults=(f"spike@samples={whole},scale=1.7",)
    )
    yield Trial(
        kind="level shift", tuned=True, cause="healthy",
        faults=(f"spike@samples={cursor}-99999999,scale=1.6",),
    )  # fmt: skip


class Bed:
    """A run on this rank in which incidents are made."""

    def __init__(self, run: Run, layout: str, noise: float) -> None:
        self.run = run
        if noise:
            self._make_noise(noise)
        self.layout = layout
        self.rank = run.opened.group.place.rank
        self.world = run.opened.group.place.world_size
        self.history = run.opened.written.journal.history
        self._numbers = itertools.count()
        run.loop.begin()
        while run.state.updates < START:
            run.loop.step()
        run.ring.drain()
        self._engine = _Kept(run.engine)
        self._state = run.state.to_json()
        self._past = copy.deepcopy(self.history.__dict__)
        plan = run.opened.corpus.stream.plan(run.state.cursor, self.history.ledger)
        self.batch = plan.positions.tolist()

    def _make_noise(self, size: float) -> None:
        """As a device whose kernels add in another order each time: no two computations alike."""
        network, twin = self.run.engine.network, self.run.engine.twin
        hook = _noisy(size, torch.Generator().manual_seed(1 + self.run.opened.group.place.rank))
        network.get_submodule("embedding").register_forward_hook(hook)
        wider = twin._wider
        if wider is not None:

            def make() -> Any:
                made = wider.make()
                made.network.get_submodule("embedding").register_forward_hook(hook)
                return made

            twin.give(type(wider)(dtype=wider.dtype, make=make))
        self.run.loop._guard._retracing._is_exact = False

    def put_back(self) -> None:
        """Everything as before the first incident, but for the ring's records and the files."""
        self.run.ring.drain()
        self.run.ring.before_update()
        self._engine.put_back(self.run.engine)
        self.run.state.load_json(copy.deepcopy(self._state))
        self.history.__dict__.update(copy.deepcopy(self._past))
        retracing = getattr(self.run.loop._guard, "_retracing", None)
        if retracing is not None:
            retracing._way = retracing._came_again = None

    def try_one(self, trial: Trial) -> Told:
        self.put_back()
        faults, known = self.run.machinery.faults, len(self.history.incidents)
        faults._faults = parse_faults(trial.faults or ("slow@step=1000000,seconds=0",))
        faults._markers = faults._markers.parent / f"trial{next(self._numbers)}"
        with self._hooked(trial), self._at_rate(trial.rate):
            try:
                for _ in range(_MOST_STEPS.get(trial.cause, 2)):
                    self.run.loop.step()
                    causes = _causes(self.history.incidents[known:])
                    if causes and _is_over(causes, trial):
                        break
            except RunnerError:
                pass
        told = self._judged(trial, _causes(self.history.incidents[known:]))
        faults._faults = parse_faults(("slow@step=1000000,seconds=0",))
        return told

    def _judged(self, trial: Trial, causes: Sequence[Mapping[str, Any]]) -> Told:
        told = Told(kind=trial.kind, tuned=trial.tuned, right=trial.cause, layout=self.layout)
        if not causes:
            return told
        last = next((c for c in reversed(causes) if c["cause"] != "unclear"), causes[-1])
        told.said, told.steps = last["cause"], sum(c["steps"] for c in causes)
        told.detail = {k: last[k] for k in ("ranks", "positions", "module", "step", "why")}
        told.detail["rate_factor"] = last["rate_factor"]
        wrong = set(last["ranks"]) - set(trial.ranks) or set(last["module"].split()) - {
            trial.module
        }
        samples = last["positions"] if last["cause"] == "data" else []
        others = set(samples) - set(trial.positions or self.batch)
        told.is_wrong_name = bool(wrong) or bool(others and trial.cause != "healthy")
        named = [tuple(last["ranks"]), tuple(samples), last["module"]]
        is_near = trial.step is None or abs((last["step"] or -9) - trial.step) <= 1
        told.is_complete = named == [trial.ranks, trial.positions, trial.module] and is_near
        return told

    @contextmanager
    def _at_rate(self, factor: float) -> Iterator[None]:
        """From the next update on the schedule has a mistake."""
        planner = self.run.loop._steps.planner
        schedule = planner.schedule
        object.__setattr__(planner, "schedule", _Jump(schedule, factor))
        try:
            yield
        finally:
            object.__setattr__(planner, "schedule", schedule)

    @contextmanager
    def _hooked(self, trial: Trial) -> Iterator[None]:
        network = self.run.engine.network
        mine = self.rank in trial.ranks
        handles: list[Any] = []
        for kind in trial.hooks:
            if kind == "matrix":
                self._spoil("param/blocks.1.ffn.down.weight", 50.0)
            elif kind == "moments":
                self._spoil("exp_avg_sq/", 1e-6)
            elif kind == "overflow":
                due = Overflow(module=trial.module, is_due=lambda: True)
                module = network.get_submodule(trial.module)
                handles.append(module.register_forward_hook(partial(_overflowing, due)))
            elif kind == "scaled":
                module = network.get_submodule(trial.module)
                handles.append(module.register_forward_hook(_scaled(1e4, [10**9])))
            elif mine:
                left = [1 if kind == "once" else 10**9]
                hook = _scaled(1e6 if kind == "once" else 1e3, left)
                handles.append(network.get_submodule("norm").register_forward_hook(hook))
                twin = kind == "always"
                handles += [self._on_twins(hook)] if twin else []
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _on_twins(self, hook: Any) -> Any:
        """A sick device is so in every precision."""
        twin = self.run.engine.twin
        wider = twin._wider
        if wider is None:
            return _Undo(lambda: None)

        def make() -> Any:
            made = wider.make()
            made.network.get_submodule("norm").register_forward_hook(hook)
            return made

        twin._wider = type(wider)(dtype=wider.dtype, make=make)
        return _Undo(lambda: setattr(twin, "_wider", wider))

    @torch.no_grad()
    def _spoil(self, name: str, factor: float) -> None:
        self.run.ring.before_update()
        for shard in self.run.engine.shards():
            if shard.name.startswith(name):
                shard.local.mul_(factor)
        self.run.engine.finish_load(self.run.engine.update_counts())


_MOST_STEPS = {"state corrupted": 30, "rate": 90, "healthy": 4}


@dataclass(frozen=True)
class _Jump:
    schedule: Any
    factor: float

    def rate(self, updates: int) -> float:
        rate: float = self.schedule.rate(updates)
        return rate * (self.factor if updates >= START else 1.0)


@dataclass
class _Undo:
    remove: Callable[[], None]


def _scaled(factor: float, left: list[int]) -> Any:
    def hook(module: Any, inputs: Any, output: Any) -> Any:
        if left[0] <= 0:
            return output
        left[0] -= 1
        return output * factor

    return hook


def _noisy(size: float, dice: torch.Generator) -> Any:
    def hook(module: Any, inputs: Any, output: Any) -> Any:
        noise = torch.randn(output.shape, generator=dice, dtype=torch.float64) * size
        return (output.double() * (1 + noise)).to(output.dtype)

    return hook


def _causes(incidents: Sequence[Incident]) -> list[Mapping[str, Any]]:
    found = [incident.detail.get("cause") for incident in incidents]
    return [cause for cause in found if isinstance(cause, Mapping)]


def _is_over(causes: Sequence[Mapping[str, Any]], trial: Trial) -> bool:
    last = causes[-1]
    return trial.cause == "healthy" or last["cause"] != "unclear" or last["remedy"] != "go back"


def worker(layout: str, out: str, options: argparse.Namespace) -> None:
    """On one rank."""
    rounds, seed = options.rounds, options.seed
    _, more = LAYOUTS[layout]
    config = compose([*ALIKE, *more, f"out={out}"])
    found: list[Told] = []
    with join(config, place_from(os.environ)) as group:
        run = open_run(config, group)
        bed = Bed(run, layout, options.noise)
        for number in range(rounds):
            dice = random.Random(f"{seed}/{layout}/{number}")
            for trial in trials(bed.world, bed.batch, dice):
                if not _is_wanted(trial.kind, options.kinds):
                    continue
                began = time.monotonic()
                told = bed.try_one(trial)
                found.append(told)
                if group.is_first:
                    seconds = time.monotonic() - began
                    print(
                        f"{layout}: {trial.kind}: {told.said} {told.is_complete} "
                        f"{'WRONG ' if told.is_wrong_name else ''}{told.detail} {seconds:.1f} s",
                        flush=True,
                    )
        if group.is_first:
            rows = [asdict(told) for told in found]
            Path(out, "trials.json").write_text(json.dumps(rows))
        run.ring.drain()
    os._exit(0)


def _run(layout: str, options: argparse.Namespace) -> list[Told]:
    ranks, _ = LAYOUTS[layout]
    folder = tempfile.mkdtemp(prefix="trials-")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += [f"--nproc-per-node={ranks}", "-m", "scripts.explain_trials", "--worker", layout]
    words += ["--rounds", str(options.rounds), "--seed", str(options.seed), "--out", folder]
    words += ["--noise", str(options.noise), "--kinds", options.kinds]
    try:
        subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return [Told(**row) for row in json.loads(Path(folder, "trials.json").read_text())]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def page(told: Sequence[Told], command: str) -> str:
    """The confusion table, as Markdown."""
    asked = [one for one in told if one.said != "nothing" and one.right != "healthy"]
    healthy = [one for one in told if one.right == "healthy"]
    right = [one for one in asked if one.said == one.right]
    wrong = [one for one in told if one.is_wrong_name]
    accused = [
        o for o in healthy if o.said.startswith("hardware") or o.said in ("numerics", "rate")
    ]
    unclear = [one for one in asked if one.said in ("unclear", "not reproducible")]
    lines = [
        "# Causes named, counted",
        "",
        f"Made by `{command}`. Each incident is made in a real run of 2 to 4 ranks; the state is",
        "put back in between. A case counts as complete where rank, samples, module and step are",
        "exactly those that were hit (the step within one). `explain=full`.",
        "",
        f"* Layouts: {'; '.join(dict.fromkeys(one.layout for one in told))}.",
        f"* {len(asked)} incidents: cause right in {len(right)} ({_share(right, asked)}), unclear "
        f"{len(unclear)} ({_share(unclear, asked)}).",
        f"* A rank, module or sample that was not hit was named in {len(wrong)}.",
        f"* {len(healthy)} healthy hard batches and level shifts: {len(accused)} were called "
        "hardware, numerics or rate.",
        f"* {len([o for o in told if o.said == 'nothing' and o.right != 'healthy'])} faults closed "
        "no gate: nobody asked, and they are not counted above.",
        "",
    ]
    for tuned, words in ((True, "the rules were tuned on"), (False, "the rules were not tuned on")):
        lines += [f"## Kinds that {words}", ""]
        lines += [
            "| what was done | right | asked | cause right | complete | said instead | "
            "computations, median (most) |",
            "|---|---|---|---|---|---|---|",
        ]
        kinds = dict.fromkeys((o.kind, o.right) for o in told if o.tuned is tuned)
        for kind, cause in kinds:
            lines.append(_row([o for o in told if o.kind == kind], kind, cause))
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _row(told: Sequence[Told], kind: str, cause: str) -> str:
    asked = [one for one in told if one.said != "nothing"]
    hits = [one for one in asked if one.said == cause]
    complete = [one for one in hits if one.is_complete]
    others = [one.said for one in asked if one.said != cause]
    instead = ", ".join(f"{word} {others.count(word)}" for word in dict.fromkeys(others)) or "-"
    steps = [one.steps for one in asked]
    cost = f"{statistics.median(steps):g} ({max(steps)})" if steps else "-"
    full = "-" if cause == "healthy" else str(len(complete))
    right = "-" if cause == "healthy" else str(len(hits))
    told_of = f"{len(asked)} of {len(told)}"
    return f"| {kind} | {cause} | {told_of} | {right} | {full} | {instead} | {cost} |"


def _is_wanted(name: str, words: str) -> bool:
    wanted = [word for word in words.split(";") if word]
    return not wanted or any(word in name for word in wanted)


def _share(part: Sequence[Any], whole: Sequence[Any]) -> str:
    return f"{100 * len(part) / max(1, len(whole)):.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="layouts whose name contains one of these")
    parser.add_argument("--kinds", default="", help="whose name contains one of these")
    parser.add_argument("--noise", type=float, default=0.0, help="relative, on every activation")
    parser.add_argument(
        "--rows", default="", help="a file of JSON lines to add to; all of it counts"
    )
    parser.add_argument("--page", default="")
    parser.add_argument("--worker", default="")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.out, options)
        return
    names = [name for name in LAYOUTS if _is_wanted(name, options.only)]
    told = [one for name in names for one in _run(name, options)]
    if options.rows:
        with Path(options.rows).open("a") as file:
            file.writelines(json.dumps(asdict(one)) + "\n" for one in told)
        lines = Path(options.rows).read_text().splitlines()
        told = [Told(**json.loads(line)) for line in lines]
    command = f"python -m scripts.explain_trials --rounds {options.rounds} --seed {options.seed}"
    command += f" --noise {options.noise}" if options.noise else ""
    command += f" --only '{options.only}'" if options.only and not options.rows else ""
    command += " --rows FILE" if options.rows else ""
    text = page(told, command)
    print(text)
    if options.page:
        Path(options.page).write_text(text)


if __name__ == "__main__":
    main()

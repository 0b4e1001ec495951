"""Puts faults into the code on purpose, and checks that a test fails.

    python -m tests.mutants               # all of them, in copies of the tree
    python -m tests.mutants NAME...       # some
    python -m tests.mutants --list
    python -m tests.mutants --json tests/records/mutants.json    # fates are added to that file

Each fault is one small replacement of text. It is refused where the text is not found exactly
once, so that a fault never silently becomes none. First the tests named below are run on a copy
without a fault: a test that fails there would see anything. Not in CI: it takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("runner", "tests", "configs", "scripts", "launch", "pyproject.toml", "README.md")
_FAILED, _PASSED = 1, 0
_LIMIT_SECONDS = 900


@dataclass(frozen=True)
class Mutant:
    """``old`` becomes ``new`` in ``file``; ``tests`` are pytest's arguments, ``only`` its -k."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    only: str = ""


REFERENCE = "tests/mechanism/test_reference.py"
REAL_RUN = "tests/drills/test_reference.py"
BUFFERS = "runner/engine/buffers.py"
STEP, FSDP, ZERO = "runner/train/step.py", "runner/engine/fsdp.py", "runner/engine/zero.py"
GATE = "runner/train/agreed_step.py"
FORWARD = "runner/engine/forward.py"
POLICY = "tests/policy"

MUTANTS = (
    # What a step computes.
    Mutant(
        "gradient divided by three times the tokens",
        STEP,
        "        scale = tokens\n",
        "        scale = tokens = tokens * 3\n",
        REFERENCE,
        "1-single:clipped",
    ),
    Mutant(
        "dropout seeded without the position",
        STEP,
        "(self._rules.seed * 1_000_003 + first)",
        "(self._rules.seed * 1_000_003)",
        REFERENCE,
        "1-single:dropout",
    ),
    Mutant(
        "dropout seeded by the step alone",
        STEP,
        "first = next((p for p in batch.positions if p is not None), plan.start)",
        "first = plan.start",
        REFERENCE,
        "1-single:dropout",
    ),
    Mutant(
        "norm of the sum, not the mean",
        STEP,
        "norm = packed[GRAD_SQUARE].sqrt() / tokens",
        "norm = packed[GRAD_SQUARE].sqrt()",
        REFERENCE,
        "1-single:clipped",
    ),
    Mutant(
        "no clipping",
        STEP,
        "grad_scale=scale.float()",
        "grad_scale=tokens.float()",
        REFERENCE,
        "1-single:clipped",
    ),
    Mutant(
        "clipped a thousandth too much",
        STEP,
        "_CLIP_EPS = 1e-6",
        "_CLIP_EPS = 2e-3",
        REFERENCE,
        "1-single:clipped",
    ),
    Mutant(
        "a replica's norm counted twice",
        FSDP,
        "self._own_gradients(), copies=self._layout.replicas",
        "self._own_gradients(), copies=1",
        REFERENCE,
        "2-ddp:sometimes",
    ),
    Mutant(
        "only the first micro-batch reduced",
        FSDP,
        "number == len(works))",
        "number == 1)",
        REFERENCE,
        "3-fsdp:at",
    ),
    Mutant(
        "gradients averaged over ranks",
        FSDP,
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(float(mesh.size()))",
        REFERENCE,
        "2-fsdp:clipped",
    ),
    Mutant(
        "ZeRO averages over ranks",
        ZERO,
        "self._engine.backward(loss * self._world_size, ",
        "self._engine.backward(loss, ",
        REFERENCE,
        "2-zero2:free",
    ),
    Mutant(
        "ZeRO averages over micro-batches",
        ZERO,
        "scale_wrt_gas=False",
        "scale_wrt_gas=True",
        REFERENCE,
        "2-zero1:clipped",
    ),
    Mutant(
        "norms decay like matrices",
        "runner/engine/optimizer.py",
        "settings.optim.weight_decay if num_dims[name] >= 2 else 0.0",
        "settings.optim.weight_decay",
        REFERENCE,
        "1-single:clipped",
    ),
    Mutant(
        "the second moment decays like the first",
        "runner/engine/builtin_optimizer.py",
        "betas = (optim.beta1, optim.beta2)",
        "betas = (optim.beta1, optim.beta1)",
        REFERENCE,
        "1-single:clipped",
    ),
    Mutant(
        "epsilon of AdamW left out",
        "runner/engine/builtin_optimizer.py",
        "eps=optim.eps",
        "eps=1e-8",
        REFERENCE,
        "1-single:clipped",
    ),
    Mutant(
        "z-loss of uncounted tokens",
        "runner/model/loss.py",
        "torch.where(targets == NOT_COUNTED, 0.0, squares)",
        "squares",
        REFERENCE,
        "3-hsdp:penalised",
    ),
    Mutant(
        "the first token of a document counts",
        "runner/data/feed.py",
        "targets[row][sample.segments[1:] != sample.segments[:-1]] = NOT_COUNTED",
        "pass",
        REFERENCE,
        "1-single:clipped",
    ),
    Mutant(
        "FSDP's shards begin a row too early",
        FSDP,
        "-(-rows // self._layout.shard_size)",
        "(rows // self._layout.shard_size)",
        REFERENCE,
        "3-fsdp:sometimes",
    ),
    Mutant(
        "the rate of the update after",
        "runner/train/step_runner.py",
        "learning_rate=self.learning_rate(updates),",
        "learning_rate=self.learning_rate(updates + 1),",
        REAL_RUN,
    ),
    Mutant(
        "the configured clip is not passed on",
        "runner/session/begin.py",
        "clip=config.optim.clip,",
        "clip=1.0,",
        REAL_RUN,
    ),
    Mutant(
        "warm-up begins at zero",
        "runner/policy/schedule.py",
        "self.peak * (updates + 1) / warmup",
        "self.peak * updates / warmup",
        f"{POLICY}/test_schedule.py",
    ),
    Mutant(
        "dropout while evaluating",
        "runner/model/decoder.py",
        "F.dropout(x, self.dropout, self.training)",
        "F.dropout(x, self.dropout, True)",
        "tests/mechanism/test_model.py tests/mechanism/test_engine.py",
        "dropout or evaluation",
    ),
    Mutant(
        "recomputed blocks drop other units",
        "runner/model/decoder.py",
        "is_random=self.dropout > 0",
        "is_random=False",
        "tests/mechanism/test_model.py",
        "recomputing",
    ),
    Mutant(
        "evaluation counts what is masked",
        "runner/model/objective.py",
        "counts = (labels != NOT_COUNTED).sum(dim=1)\n        return",
        "counts = (labels == labels).sum(dim=1)\n        return",
        "tests/mechanism/test_engine.py",
        "evaluation",
    ),
    Mutant(
        "evaluation leaves dropout off",
        "runner/engine/modes.py",
        "            module.training = is_training\n",
        "            pass\n",
        "tests/mechanism/test_check_model.py",
        "changes_a_mode",
    ),
    Mutant(
        "after an evaluation everything is in training mode",
        "runner/engine/modes.py",
        "            module.training = is_training\n",
        "            module.training = True\n",
        "tests/mechanism/test_check_model.py",
        "changes_a_mode",
    ),
    Mutant(
        "buffers change in a step that is not applied",
        BUFFERS,
        "stays = (skip != 0) | (sums[-1] == 0)",
        "stays = sums[-1] == 0",
        "tests/mechanism/test_running_buffers.py",
        "leaves",
    ),
    Mutant(
        "a micro-batch begins with the buffers of the one before",
        FORWARD,
        "        self._buffers.restore()  # from before the step\n",
        "",
        "tests/mechanism/test_running_buffers.py",
        "mean_by_samples",
    ),
    Mutant(
        "micro-batches have equal weights, whatever is padding",
        BUFFERS,
        "weight = (counts > 0).sum().double()",
        "weight = counts.new_ones(()).double()",
        "tests/mechanism/test_running_buffers.py",
        "mean_by_samples",
    ),
    Mutant(
        "a buffer that is not finite is not told",
        FORWARD,
        "            total = total + buffers\n",
        "            pass\n",
        "tests/mechanism/test_running_buffers.py",
        "leaves_every_bit",
    ),
    # What the ranks agree on, and the gate.
    Mutant(
        "a rank's own NaN is not told",
        FORWARD,
        "(~torch.isfinite(total)).double()",
        "torch.zeros((), dtype=torch.float64)",
        "tests/mechanism/test_engine.py",
        "skipped_update or layout",
    ),
    Mutant(
        "the gate does not look at the ranks' own NaN",
        GATE,
        "~(bounded & (packed[NONFINITE] == 0)) | closed",
        "~bounded | closed",
        "tests/mechanism/test_step.py",
    ),
    Mutant(
        "the samples are not part of what must be equal",
        STEP,
        '            "samples": [plan.batch.start, plan.batch.stop],\n',
        "",
        "tests/mechanism/test_step.py",
    ),
    Mutant(
        "the settings are not part of what must be equal",
        STEP,
        '            "config": self._rules.config_digest,\n',
        "",
        "tests/mechanism/test_step.py",
    ),
    Mutant(
        "a step behind one that was not applied is applied",
        GATE,
        "closed | (before[CLOSED] > 0) | (before[STOP] > 0)",
        "closed | (before[STOP] > 0)",
        "tests/mechanism/test_late.py",
    ),
    # The data cursor.
    Mutant(
        "every epoch in the same order",
        "runner/data/cursor.py",
        "_mix_int(_mix_int(seed + _GOLDEN) + epoch * _GOLDEN)",
        "_mix_int(_mix_int(seed + _GOLDEN))",
        f"{POLICY}/test_permutation.py tests/mechanism/test_feed.py",
    ),
    Mutant(
        "held-out samples are trained on",
        "runner/data/cursor.py",
        "np.flatnonzero(~self.order.is_held_out(indices))",
        "np.arange(len(indices))",
        "tests/mechanism/test_feed.py",
    ),
    Mutant(
        "the ledger forgets a range's last position",
        "runner/policy/decision/skip_ledger.py",
        "start = max(start, skip_stop)",
        "start = max(start, skip_stop - 1)",
        f"{POLICY}/test_ledger.py",
    ),
    # The guard and the ring.
    Mutant(
        "NaN passes for low",
        "runner/policy/decision/judge.py",
        "return not signals.loss <= self._limits[True].loss",
        "return signals.loss > self._limits[True].loss",
        f"{POLICY}/test_verdict.py tests/mechanism/test_late.py",
    ),
    Mutant(
        "a bad step does not begin the probation anew",
        "runner/policy/decision/judge.py",
        '        """Record a step that was not clean: probations of checkpoints start over."""\n'
        "        self.clean_streak = 0\n",
        '        """Record a step that was not clean."""\n',
        POLICY,
    ),
    Mutant(
        "proven a step too early",
        "runner/policy/retention/records.py",
        "step - record.step >= clean_after and",
        "step - record.step >= clean_after - 1 and",
        f"{POLICY}/test_ring.py",
    ),
    Mutant(
        "back to a checkpoint behind the trouble",
        "runner/policy/retention/records.py",
        "record.cursor <= cursor and record.step <= step",
        "record.step <= step",
        f"{POLICY}/test_ring.py {POLICY}/test_remedy.py",
    ),
    Mutant(
        "an unproven checkpoint is a target",
        "runner/policy/retention/records.py",
        "if record.state is State.clean and record.cursor",
        "if record.state is not State.tainted and record.cursor",
        f"{POLICY}/test_ring.py",
    ),
    Mutant(
        "the last clean checkpoint may go",
        "runner/policy/retention/records.py",
        "clean[: max(1, keep)]",
        "clean[: max(1, keep) - 1]",
        f"{POLICY}/test_ring.py",
    ),
    Mutant(
        "a restart takes a tainted checkpoint",
        "runner/policy/retention/records.py",
        "if record.state is not State.tainted]\n    return sorted",
        "]\n    return sorted",
        f"{POLICY}/test_ring.py",
    ),
    Mutant(
        "no margin before the onset",
        "runner/policy/decision/ladder.py",
        "case.history.ledger.before(case.onset[1], guard.margin * batch)",
        "case.onset[1]",
        f"{POLICY}/test_remedy.py",
    ),
    Mutant(
        "the episode's bad steps are not restored",
        "runner/policy/decision/ladder.py",
        "self._num_recent = sum(self._recent)",
        "self._num_recent = 0",
        POLICY,
    ),
    Mutant(
        "copies compared by a plain sum",
        "runner/health/rank_checks.py",
        "_mixed(piece, places[: len(piece)]).sum()",
        "piece.sum()",
        "tests/mechanism/test_inspection.py",
    ),
    # Loops of somebody's own.
    Mutant(
        "Guard, Ring: a loop's next step does not wait for the copy of a snapshot",
        "runner/embed/opening.py",
        "ring.overlap = False",
        "ring.overlap = True",
        "tests/drills/test_late_copies.py",
        "trace and loop",
    ),
    Mutant(
        "Ring: a small tensor that begins to differ between ranks later",
        "runner/embed/ring.py",
        "(size > _SMALL and name in self._compared)",
        "name in self._compared",
        "tests/mechanism/test_ring_alone.py",
        "differ",
    ),
    Mutant(
        "Guard, sync=False: extra state of the step before is not put back",
        "runner/embed/state/loop_state.py",
        "self.extra.restore(older=older)",
        "self.extra.restore()",
        "tests/mechanism/test_guard_late.py",
        "modules_count",
    ),
    Mutant(
        "Guard: batches of a refused step are not read once more",
        "runner/embed/loop/guard.py",
        "            lambda: source.resume(place.begun, draws.mark, draws.drawn, is_over=False),\n",
        "            lambda: None,\n",
        "tests/mechanism/test_strange_loops.py",
        "accumulated",
    ),
    Mutant(
        "Guard: what reading a refused step's later batches drew is drawn again",
        "runner/embed/state/randomness.py",
        "        self.left.take(after, drew)\n",
        "",
        "tests/mechanism/test_strange_loops.py",
        "accumulated",
    ),
    Mutant(
        "Sampler: set_epoch leaves out the remainder of the passes before",
        "runner/embed/data/sampler.py",
        "        remaining -= remaining % self.global_size\n",
        "",
        "tests/mechanism/test_sampler.py",
        "jumped",
    ),
    # Probes, audits, warnings, mixtures; Muon.
    Mutant(
        "Muon: every rank takes rank 0's rows",
        "runner/engine/builtin_optimizer.py",
        "orthogonalised(whole.to(dtype))[first : first + len(shard)]",
        "orthogonalised(whole.to(dtype))[: len(shard)]",
        REFERENCE,
        "number_of_ranks",
    ),
    Mutant(
        "the budget of replays is forgotten",
        "runner/policy/decision/history.py",
        "        self.num_probes += probes_of(incident)\n",
        "",
        f"{POLICY}/test_history.py",
    ),
    Mutant(
        "the budget of replays is not looked at",
        "runner/explain/explaining_guard.py",
        "if left < self._rules.an_incident or len(",
        "if len(",
        "tests/mechanism/test_explain.py",
        "budget",
    ),
    Mutant(
        "a step is redone without limit",
        "runner/explain/explaining_guard.py",
        "_MOST_REDONE = 4",
        "_MOST_REDONE = 4000",
        "tests/mechanism/test_explain.py",
        "at_most",
    ),
    Mutant(
        "audits always take rank 0's samples",
        "runner/explain/audit.py",
        "self._feed.read_again(plan, number % self._ranks.world_size)",
        "self._feed.read_again(plan, 0)",
        "tests/mechanism/test_audit.py",
    ),
    Mutant(
        "own gradients: the first micro-batch only",
        "runner/explain/audit.py",
        "            checksum = self._sums[name] * _FACTOR + checksum\n",
        "            checksum = self._sums[name]\n",
        "tests/mechanism/test_audit.py",
    ),
    Mutant(
        "early warnings keep what a rollback undid",
        "runner/policy/decision/early.py",
        "            self._past.pop()  # after a rollback\n",
        "            break\n",
        f"{POLICY}/test_early.py",
    ),
    Mutant(
        "the held-out split is alike in all sources",
        "runner/data/mixture.py",
        "split=_name_hash(name)",
        "split=0",
        "tests/mechanism/test_mixture.py",
    ),
    Mutant(
        "plans are kept when weights change",
        "runner/startup/resume.py",
        "    stream.forget()\n",
        "",
        "tests/mechanism/test_mixture.py",
    ),
    # A request to stop.
    Mutant(
        "an evaluation does not look at the request",
        "runner/train/evaluate.py",
        "self._stop.over([batch.to(self._engine.device) for batch in self._batches])",
        "[batch.to(self._engine.device) for batch in self._batches]",
        "tests/drills/test_stop.py",
        "evaluation",
    ),
    Mutant(
        "the line of an update is forgotten at a stop",
        "runner/train/state.py",
        '            **({"unreported": self.unreported.to_state()} if self.unreported else {}),\n',
        "",
        "tests/drills/test_stop.py",
        "evaluation",
    ),
    Mutant(
        "a probe does not look at the request",
        "runner/health/preemption.py",
        "            self._look()\n",
        "            pass\n",
        "tests/drills/test_stop.py",
        "A-SIGUSR1",
    ),
)

NAMES = [mutant.name for mutant in MUTANTS]


class Refused(Exception):
    """The fault cannot be put into the code."""


def copy_tree(into: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(source, into / name, ignore=ignored)
        else:
            shutil.copy2(source, into / name)


def put_in(mutant: Mutant, tree: Path) -> None:
    """
    Raises:
        Refused: its text is not there exactly once.
    """
    path = tree / mutant.file
    text = path.read_text()
    count = text.count(mutant.old)
    if count != 1:
        raise Refused(f"{mutant.name}: {mutant.file} has the text to replace {count} times")
    path.write_text(text.replace(mutant.old, mutant.new))


def run_tests(tree: Path, tests: Sequence[str], only: str) -> int:
    """pytest's exit code; a hang counts as a failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    command += ["-k", only] if only else []
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    with (tree / "output.txt").open("w") as output:
        try:
            done = subprocess.run(
                command,
                cwd=tree,
                env=environment,
                stdout=output,
                stderr=output,
                timeout=_LIMIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return _FAILED
    return done.returncode


def fate(mutant: Mutant | None, tests: Sequence[str], only: str) -> str:
    """ "seen", "survives", or what went wrong; without a mutant what a whole tree gives."""
    with tempfile.TemporaryDirectory(prefix="holdfast-mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        if mutant is not None:
            put_in(mutant, tree)
        code = run_tests(tree, tests, only)
        if code not in (_PASSED, _FAILED):
            return f"pytest ended with {code}:\n{(tree / 'output.txt').read_text()[-2000:]}"
        return "survives" if code == _PASSED else "seen"


def check_whole(mutants: Sequence[Mutant]) -> None:
    """The tests must pass without a fault, or they would see anything.

    Raises:
        Refused: they do not.
    """
    for tests, only in dict.fromkeys((mutant.tests, mutant.only) for mutant in mutants):
        result = fate(None, tests.split(), only)
        if result != "survives":
            raise Refused(f"without a fault, {tests} {only}: {result}")


def record(into: Path, mutant: Mutant, result: str, seconds: float) -> None:
    """Put one fate into the file, in place of what it has of the same fault."""
    records = json.loads(into.read_text())["mutants"] if into.exists() else []
    kept = [row for row in records if row["name"] != mutant.name and row["name"] in NAMES]
    kept.append(
        {
            "name": mutant.name,
            "file": mutant.file,
            "tests": " -k ".join(filter(None, [mutant.tests, mutant.only])),
            "fate": result,
            "date": datetime.now(UTC).date().isoformat(),
            "seconds": round(seconds, 1),
        }
    )
    kept.sort(key=lambda row: NAMES.index(row["name"]))
    head = {"command": "python -m tests.mutants --json " + into.as_posix(), "mutants": kept}
    into.parent.mkdir(parents=True, exist_ok=True)
    into.write_text(json.dumps(head, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults, by a part of their name")
    parser.add_argument("--list", action="store_true", help="print their names")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a fault")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the fates to this record")
    options = parser.parse_args()
    wanted = [m for m in MUTANTS if not options.names or any(n in m.name for n in options.names)]
    if options.list:
        print("\n".join(mutant.name for mutant in wanted))
        return 0
    with tempfile.TemporaryDirectory(prefix="holdfast-mutant-") as folder:
        copy_tree(Path(folder))
        for mutant in wanted:
            put_in(mutant, Path(folder))
            shutil.copy2(ROOT / mutant.file, Path(folder) / mutant.file)
    if not options.trust:
        check_whole(wanted)
    fates = {}
    for mutant in wanted:
        began = time.monotonic()
        result = fates[mutant.name] = fate(mutant, mutant.tests.split(), mutant.only)
        seconds = time.monotonic() - began
        print(f"{result:8}  {mutant.name}  {seconds:.0f} s", flush=True)
        if options.json:
            record(options.json, mutant, result, seconds)
    survivors = [name for name, result in fates.items() if result != "seen"]
    print(f"{len(fates) - len(survivors)} of {len(fates)} seen")
    return 1 if survivors else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refused as refusal:
        sys.exit(f"refused: {refusal}")

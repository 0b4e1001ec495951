"""Runs inside a Slurm job, on its first node: attempts on chosen nodes, until the job ends.

An attempt has a torchrun agent on each node. All attempts on the same nodes share one ``srun``. A
node that does not report how its part ended, while others do, has failed: it is listed and left out
where a spare is there.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.distributed.env import END_TIME
from runner.launch import slurm, torchrun
from runner.launch.attempt import FINAL, Ended, Job, Stop, StopTarget
from runner.launch.crash_evidence import BadNodes
from runner.launch.node_memory import NodeMemory
from runner.launch.slurm import MOST_BYTES, NODE_COMMAND, JobStep, announce
from runner.launch.supervisor import JobSupervisor
from runner.policy.nodes import DIED, choose
from runner.policy.restart import RestartRules, without_progress
from runner.system.environment import variables
from runner.system.error import EXIT_DONE, EXIT_PREEMPTED, RunnerError

_FIRST_PORT, _NUM_PORTS = 20000, 10000
_NODES_FILE, _ADDRESSES_FILE = ".nodes", ".addresses"
_KILLED_SECONDS = 90.0


class TooFewNodes(RunnerError):
    """The allocation has lost more nodes than it had spares."""


@dataclass(eq=False)
class SlurmJob:
    """One incarnation of a batch job.

    Args:
        spares: nodes of the allocation beyond those to train on.
        requeues: False where another job of a chain goes on.
        launch_options: for ``runner launch`` on each node.
        memory: of what happened to nodes in any run.
    """

    environment: Mapping[str, str]
    out: Path
    spares: int
    requeues: bool
    overrides: Sequence[str]
    launch_options: Sequence[str]
    rules: RestartRules
    say: Callable[[str], None]
    memory: NodeMemory | None = None
    _lost: set[str] = field(default_factory=set)
    _chosen: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._out = self.out.absolute()
        self._job_id = self.environment["SLURM_JOB_ID"]
        self._nodes = slurm.hostnames(self.environment["SLURM_JOB_NODELIST"])
        self._count = len(self._nodes) - self.spares
        self._restart = int(self.environment.get("SLURM_RESTART_COUNT", "0"))
        self._bad = BadNodes(self._out)
        self._exits = self._out / "exits"
        self._step, self._mark = JobStep(), secrets.token_hex(8)

    def run(self) -> int:
        """Run until the job ends or goes back into the queue; returns the exit code."""
        self._blame_the_dead()
        supervisor = JobSupervisor(
            out=self._out,
            launch_id=f"slurm-{self._job_id}",
            rules=self.rules,
            make_job=self._make_job,
            say=self.say,
            ended=self._note_failed,
        )
        supervisor.memory = self.memory
        try:
            end = supervisor.run()
        except TooFewNodes as error:
            self.say(str(error))
            return self._requeue()
        finally:
            self._step.close()
        self.say(end.reason)
        if not self._goes_on(end.code, supervisor.stop):
            return end.code
        vain = without_progress(supervisor.attempts)
        if vain > self.rules.restarts:
            self.say(f"{vain} attempts without a new clean checkpoint: not put back in the queue")
            return end.code
        return self._requeue()

    def _goes_on(self, code: int, stop: Stop) -> bool:
        """Whether to put the job back into the queue.

        A job that was warned and then failed goes back, too: its time limit would end it for good.
        A job that got SIGTERM alone is being cancelled, or requeued by somebody else.
        """
        if code == EXIT_DONE or code in FINAL:
            return False
        return stop.is_for_a_restart or (code == EXIT_PREEMPTED and not stop.is_set)

    def _make_job(self, number: int, diagnose: bool) -> Job:
        self._lost |= slurm.unusable(self._nodes)
        bad = self._bad.read()
        known = self.memory.standings(self._nodes) if self.memory else {}
        chosen = choose(self._nodes, count=self._count, bad=bad, lost=self._lost, known=known)
        if chosen is None:
            raise TooFewNodes(
                f"{len(self._lost)} of {len(self._nodes)} nodes are lost "
                f"({', '.join(sorted(self._lost))}), {self._count} are needed"
            )
        self._chosen = chosen
        left_out = [node for node in self._nodes if node not in chosen]
        self.say(
            f"attempt {number} on {', '.join(chosen)}"
            + (f", left out: {', '.join(left_out)}" if left_out else "")
        )
        exits = self._exits / f"{self._job_id}-{self._restart}-{number}"
        exits.mkdir(parents=True, exist_ok=True)
        (exits / _NODES_FILE).write_text("\n".join(chosen) + "\n")
        overrides = torchrun.diagnosing(self.overrides) if diagnose else self.overrides
        return Job(
            command=self._srun(chosen, overrides),
            environment=self._step_environment(chosen, number, exits / _ADDRESSES_FILE),
            forward=StopTarget.srun,
            expected=frozenset(chosen),
            exits=exits,
            popen=self._step.popen,
            stays=True,
            mark=self._mark,
        )

    def _srun(self, chosen: Sequence[str], overrides: Sequence[str]) -> list[str]:
        names = ",".join(chosen)
        if len(names) > MOST_BYTES:  # with a slash in it srun takes it for a file of names
            file = self._exits.absolute() / f"nodes-{hashlib.sha256(names.encode()).hexdigest()}"
            file.write_text("\n".join(chosen) + "\n")
            names = str(file)
        return [
            "srun",
            f"--nodes={len(chosen)}",
            f"--ntasks={len(chosen)}",
            "--ntasks-per-node=1",
            f"--nodelist={names}",
            # What is left of an attempt before must not keep the next one waiting.
            "--overlap",
            # Each node ends its own part and reports how; Slurm would kill it before it can.
            "--kill-on-bad-exit=0",
            "--wait=0",
            *(sys.executable, "-m", "runner", NODE_COMMAND),
            *("--restarts", "0"),
            *self.launch_options,
            *overrides,
        ]

    def _step_environment(self, chosen: Sequence[str], number: int, file: Path) -> dict[str, str]:
        known = slurm.addresses(chosen)
        # Another port each time: the one before may not be free yet.
        shift = int(self._job_id) * 64 + self._restart * 8 + number
        variables = dict(self.environment)
        pairs = [(node, known.get(node, node)) for node in chosen]
        variables |= announce(pairs, _FIRST_PORT + shift % _NUM_PORTS, file=file)
        limit = slurm.end_time(self._job_id)
        if limit is not None:
            variables[END_TIME] = str(int(limit))
        return variables

    def _note_failed(self, number: int, ended: Ended) -> None:
        if ended.code != EXIT_DONE:
            dead = slurm.unusable(self._chosen)
            self._list(sorted(dead), "died")
            self._list(sorted(ended.missing - dead), "did not answer when the others ended")
            self._lost |= ended.missing | dead
            failed = sorted(ended.missing | dead)
            if failed:
                self.say(f"failed: {', '.join(failed)} (listed in {self._out / 'bad_nodes'})")
        shutil.rmtree(self._exits / f"{self._job_id}-{self._restart}-{number}")

    def _blame_the_dead(self) -> None:
        """List the nodes whose part of the attempt never ended and that are dead now."""
        for folder in sorted(self._exits.glob(f"{self._job_id}-*")):
            nodes = folder / _NODES_FILE
            if nodes.exists():
                names = nodes.read_text().split()
                dead = slurm.unusable(names)
                self._list([n for n in names if n in dead], "died")
                # Ranks behind a cut link tell their ends here, and their supervisor reads them.
                nodes.unlink()
            else:  # of the start before that one
                shutil.rmtree(folder)

    def _list(self, nodes: Sequence[str], reason: str) -> None:
        self._bad.add(nodes, reason)
        if self.memory is not None:
            for node in nodes:
                self.memory.note(node, DIED, reason)

    def _requeue(self) -> int:
        if self.requeues and slurm.requeue(self._job_id):
            # Slurm ends this process; leaving first would look like the job's own end.
            time.sleep(_KILLED_SECONDS)
        return EXIT_PREEMPTED


def end_the_chain(environment: Mapping[str, str], code: int) -> None:
    """Cancel the later jobs of a chain when nothing is left for them to do."""
    if code == EXIT_DONE or code in FINAL:
        name, user = environment["SLURM_JOB_NAME"], environment.get("SLURM_JOB_USER", "")
        slurm.cancel_pending(name, user or variables()["USER"])

"""Real Slurm daemons, real jobs: whatever the cluster does to it, the run has the same end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.launch.node_memory import NodeFolder
from runner.launch.process_tree import is_there
from runner.launch.slurm import NODE_COMMAND
from runner.system.process import stat_fields
from tests import cluster as slurm
from tests.cluster import Cluster, Namespaced
from tests.conftest import MEMORY_DIR
from tests.drills.compare import assert_every_sample_once, assert_same_run
from tests.drills.conftest import done_with_snapshots, remembered
from tests.run import TINY, Result, environment_of, journalled, metrics_step, unbroken

REASON = slurm.unavailable()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
    pytest.mark.timeout(1500),
]
# Long enough to be hit in the middle: two ranks on two nodes take 60 steps in a few seconds.
SLOW = "faults=[slow@step=28-60,seconds=0.3]"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(["nodeA", "nodeB", "nodeC"]) as up:
        yield up


class Submitted:
    """A job in the queue, and the run it works on."""

    def __init__(self, cluster: Cluster, out: Path, *words: str, nodes: int = 2) -> None:
        self.cluster = cluster
        self.out = out
        self.log = out.with_suffix(".log")
        options = ["--nodes", str(nodes), "--nproc", "1", "--log", str(self.log), "--submit"]
        overrides = [word for word in words if not word.startswith("--")]
        options += [word for word in words if word.startswith("--")]
        runner = [sys.executable, "-m", "runner", "slurm", *options]
        said = cluster.run(*runner, f"out={out}", *TINY, *unbroken(overrides))
        self.ids = [line.split()[1] for line in said.splitlines()]

    @property
    def job(self) -> dict[str, str]:
        return self.cluster.job(self.ids[0])

    def until_step(self, step: int) -> None:
        self.cluster.until(lambda: metrics_step(self.out) >= step, f"step {step}\n{self.text}")

    def until_started(self, times: int) -> None:
        started = lambda: journalled(self.out, "start") >= times  # noqa: E731
        self.cluster.until(started, f"start {times}\n{self.text}")

    def wait(self, state: str = "COMPLETED", timeout: float = 600) -> Result:
        ended = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
        over = lambda: self.job["JobState"] in ended  # noqa: E731
        self.cluster.until(over, f"the job's end\n{self.text}", timeout)
        assert self.job["JobState"] == state, self.text + self.cluster.logs()
        code = int(self.job["ExitCode"].split(":")[0])
        return Result(out=self.out, code=code, text=self.text)

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


# The run knows its limit and would stop by itself.
WARNED_ONLY = "preempt.margin_seconds=1"
Submit = Callable[..., Submitted]


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Iterator[Submit]:
    """Submits; afterwards nothing may be left of the jobs, and all nodes are up again."""
    jobs: list[Submitted] = []

    def submit(*words: str, nodes: int = 2) -> Submitted:
        jobs.append(Submitted(cluster, tmp_path / "run", *words, nodes=nodes))
        return jobs[-1]

    yield submit
    for job in jobs:
        cluster.run("scancel", *job.ids)
    for node in cluster.nodes:
        if not cluster.machines.is_up(node):
            cluster.boot(node)
    nobody = lambda: not cluster.machines.left_behind()  # noqa: E731
    cluster.until(nobody, f"nobody left of {cluster.machines.left_behind()}")
    cluster.until(cluster.is_idle, f"all nodes idle, not {cluster.states()}")
    left = set(done_with_snapshots(Path(cluster.environment[MEMORY_DIR])))
    assert not left & {str(job.out) for job in jobs}


@pytest.mark.twin
@pytest.mark.full
def test_a_lost_node_puts_the_job_back_in_the_queue(
    cluster: Cluster, submit: Submit, clean: Result
) -> None:
    job = submit(SLOW)
    job.until_step(30)
    assert job.job["NodeList"] == "nodeA,nodeB"
    cluster.crash("nodeB")
    job.until_started(2)
    assert job.job["NodeList"] == "nodeA,nodeC" and job.job["Restarts"] == "1", job.text
    run = job.wait()
    assert run.summary["restarts"] == 1
    assert_same_run(run, clean)
    assert_every_sample_once(run)


@pytest.mark.twin
@pytest.mark.full
def test_a_spare_stands_in_for_a_lost_node(cluster: Cluster, submit: Submit, clean: Result) -> None:
    """The job keeps its allocation and its first node: no queue, no new batch script."""
    job = submit(SLOW, "--spares=1")
    job.until_step(30)
    cluster.crash("nodeB")
    began = time.monotonic()
    job.until_started(2)
    print(f"training again {time.monotonic() - began:.1f} s after the node was lost")
    run = job.wait()
    assert job.job["Restarts"] == "0", run.tail
    (line,) = (job.out / "bad_nodes").read_text().splitlines()
    assert line.startswith("nodeB 20") and line.endswith(("died", "others ended")), line
    assert "attempt 2 on nodeA, nodeC, left out: nodeB" in run.text, run.tail
    assert_same_run(run, clean)
    assert_every_sample_once(run)


@pytest.mark.twin
@pytest.mark.full
def test_a_node_that_failed_in_another_run_is_the_spare(
    cluster: Cluster, submit: Submit, clean: Result, tmp_path: Path
) -> None:
    """And the last resort: checked first, once another is lost."""
    folder = tmp_path / "nodes"
    told = remembered(folder, "nodeA")
    job = submit(SLOW, "--spares=1", told, "cluster.burn_in_seconds=0")
    job.until_step(30)
    assert "attempt 1 on nodeB, nodeC, left out: nodeA" in job.text
    assert job.job["BatchHost"] == "nodeA", "where the job itself is does not matter"
    cluster.crash("nodeC")
    job.until_started(2)
    run = job.wait()
    assert "attempt 2 on nodeA, nodeB, left out: nodeC" in run.text, run.tail
    events = {(event.host, event.kind) for event in NodeFolder(folder).events()}
    assert events == {("nodeA", "hardware"), ("nodeA", "passed"), ("nodeC", "died")}
    assert_same_run(run, clean)
    assert_every_sample_once(run)


@pytest.mark.full
def test_the_time_limit_is_met_with_a_checkpoint(
    cluster: Cluster, submit: Submit, clean: Result
) -> None:
    """A minute is the shortest limit there is; Slurm looks at limits every 30 s.

    So the warning comes 20 to 60 s after the start: until then the run must not have ended. A
    job that is put back waits a while in the queue.
    """
    job = submit(WARNED_ONLY, "faults=[slow@step=1-58,seconds=1]", "--time=1", "--warning=30")
    warned = lambda: journalled(job.out, "preempted")  # noqa: E731
    cluster.until(warned, f"the warning\n{job.text}")
    cluster.run("scontrol", "update", f"JobId={job.ids[0]}", "TimeLimit=10")
    run = job.wait()
    assert job.job["Restarts"] == "1", run.tail
    assert not (job.out / "bad_nodes").exists()
    assert [line["kind"] for line in run.journal()][:3] == ["start", "preempted", "start"]
    saved = run.journal("preempted")[0]["step"]
    assert run.journal("start")[1]["step"] == saved > 0, "it lost no step"
    assert_same_run(run, clean)


@pytest.mark.full
def test_a_more_important_job_takes_the_nodes(
    cluster: Cluster, submit: Submit, clean: Result
) -> None:
    """Slurm's own preemption: SIGTERM, a grace, and back into the queue."""
    job = submit(SLOW)
    job.until_step(30)
    urgent = ["--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--parsable"]
    other = cluster.run("sbatch", *urgent, "--wrap=sleep 5").strip()
    run = job.wait()
    assert cluster.job(other)["JobState"] == "COMPLETED"
    assert job.job["Restarts"] == "1" and not (job.out / "bad_nodes").exists(), run.tail
    assert [line["kind"] for line in run.journal()][:3] == ["start", "preempted", "start"]
    asked = run.journal("preempted")[0]
    assert "SIGTERM" in asked["reason"], asked
    assert run.journal("start")[1]["step"] == asked["step"] >= 30, "it lost no step"
    assert_same_run(run, clean)


@pytest.mark.full
def test_a_limit_too_short_for_any_step_is_no_endless_loop(submit: Submit) -> None:
    """Two minutes before its end it stops; it has one."""
    job = submit("checkpoint.every=20", "checkpoint.clean_after=20", "--time=1")
    run = job.wait("FAILED")
    assert run.code == 75 and "not put back in the queue" in run.text, run.tail
    # Five in a row without a new checkpoint; the first start may still save the initial state.
    assert int(job.job["Restarts"]) in (5, 6)


@pytest.mark.twin
@pytest.mark.full
def test_a_lost_first_node_takes_the_batch_script_with_it(
    cluster: Cluster, submit: Submit, clean: Result
) -> None:
    job = submit(SLOW)
    job.until_step(30)
    cluster.crash("nodeA")
    run = job.wait()
    assert job.job["Restarts"] == "1" and job.job["NodeList"] == "nodeB,nodeC", run.tail
    assert (job.out / "bad_nodes").read_text().startswith("nodeA 20")
    assert_same_run(run, clean)


@pytest.mark.full
def test_a_chain_goes_on_where_the_job_before_ended(
    cluster: Cluster, submit: Submit, clean: Result
) -> None:
    job = submit(SLOW, "--chain=3")
    job.until_step(30)
    cluster.run("scancel", "--signal=USR1", "--batch", job.ids[0])
    over = lambda: cluster.job(job.ids[1])["JobState"] == "COMPLETED"  # noqa: E731
    cluster.until(over, "the second job's end")
    assert job.job["JobState"] == "FAILED" and job.job["ExitCode"] == "75:0", job.text
    assert cluster.job(job.ids[2])["JobState"] == "CANCELLED", "nothing is left for it"
    run = Result(out=job.out, code=0, text=job.text)
    assert_same_run(run, clean)


@pytest.mark.full
def test_a_halted_run_is_not_started_again(submit: Submit) -> None:
    run = submit("faults=[poison@samples=100-900]", "guard.max_rollbacks=0").wait("FAILED")
    assert run.code == 3 and run.summary["status"] == "halted", run.tail
    assert len(run.journal("start")) == 1


@pytest.mark.twin
@pytest.mark.full
def test_a_killed_rank_is_started_again_in_its_allocation(
    cluster: Cluster, submit: Submit, clean: Result
) -> None:
    """In the same job step: its processes have imported everything."""
    job = submit("faults=[kill@step=30,rank=1,slow@step=32-60,seconds=0.1]")
    job.until_started(2)
    steps = cluster.run("squeue", "--steps", f"--jobs={job.ids[0]}", "--noheader", "--format=%i")
    assert f"{job.ids[0]}.0" in steps.split() and f"{job.ids[0]}.1" not in steps.split(), steps
    run = job.wait()
    assert job.job["Restarts"] == "0" and run.summary["restarts"] == 1, run.tail
    assert not (job.out / "bad_nodes").exists(), "the node itself was well"
    assert_same_run(run, clean)


@pytest.mark.twin
@pytest.mark.full
@pytest.mark.parametrize("continued", [True, False])
def test_a_node_whose_launcher_is_stopped_while_its_rank_dies(
    cluster: Cluster, submit: Submit, clean: Result, continued: bool
) -> None:
    """SIGSTOP. Continued in time it is as if nothing had been; else its node has not answered."""
    if not isinstance(cluster.machines, Namespaced):
        pytest.skip("no network namespaces: it is not known whose processes they are")
    job = submit("faults=[slow@step=28-60,seconds=0.3]")
    job.until_step(30)
    processes = cluster.machines.network.processes("nodeB")
    (launcher,) = [pid for pid, words in processes.items() if f" {NODE_COMMAND} " in words]
    (rank,) = [pid for pid in processes if environment_of(pid).get("RANK") == "1"]
    os.kill(launcher, signal.SIGSTOP)
    os.kill(rank, signal.SIGKILL)
    told = lambda: [*job.out.glob("exits/*/nodeA"), *job.out.glob("exits/*/nodeB")]  # noqa: E731
    cluster.until(told, f"what the other node says\n{job.text}")
    if continued:
        os.kill(launcher, signal.SIGCONT)
    run = job.wait()
    assert job.job["Restarts"] == ("0" if continued else "1"), run.tail
    assert (job.out / "bad_nodes").exists() is not continued, run.tail
    assert not is_there(launcher)
    assert_same_run(run, clean)
    assert_every_sample_once(run)


@pytest.mark.full
def test_a_job_that_is_suspended_goes_on(cluster: Cluster, submit: Submit, clean: Result) -> None:
    """All its processes are stopped, and continued, as where jobs take turns."""
    job = submit(SLOW)
    job.until_step(30)
    cluster.run("scontrol", "suspend", job.ids[0])
    pids = cluster.machines.left_behind()
    stopped = lambda: all(stat_fields(pid)[:1] == ["T"] for pid in pids)  # noqa: E731
    cluster.until(stopped, f"all of {pids} stopped")
    before = metrics_step(job.out)
    time.sleep(12.0)  # the others of a job are taken for dead after nine
    assert metrics_step(job.out) == before
    cluster.run("scontrol", "resume", job.ids[0])
    run = job.wait()
    assert job.job["Restarts"] == "0" and not (job.out / "bad_nodes").exists(), run.tail
    assert_same_run(run, clean)
    assert_every_sample_once(run)


@pytest.mark.twin
@pytest.mark.full
def test_a_cut_off_node_publishes_nothing(
    cluster: Cluster, submit: Submit, clean_alone: Result
) -> None:
    """Split brain: alone in its job it trains on, with all the files at hand, while Slurm has
    given the run to another node."""
    if not isinstance(cluster.machines, Namespaced):
        pytest.skip("no network namespaces: a link cannot be cut")
    network = cluster.machines.network
    job = submit("faults=[slow@step=10-40,seconds=2]", nodes=1)  # longer than Slurm waits
    job.until_step(15)
    (node,) = job.job["NodeList"].split(",")
    network.cut(node)
    cut = time.monotonic()
    job.until_started(2)
    taken = time.monotonic()
    assert metrics_step(job.out) >= 15
    gone = lambda: not any("out=" in words for words in network.processes(node).values())  # noqa: E731
    cluster.until(gone, f"the old incarnation gone from {node}")
    print(
        f"requeued {taken - cut:.1f} s after the cut; the old incarnation was gone "
        f"{time.monotonic() - taken:.1f} s later, the link still being cut"
    )
    network.heal(node)
    run = job.wait()
    assert [line["attempt"] for line in run.journal("start")] == [1, 2], run.tail
    assert_same_run(run, clean_alone)
    assert_every_sample_once(run)


def test_srun_alone_launches_too(cluster: Cluster, tmp_path: Path, clean: Result) -> None:
    """Without torchrun: rank, world and meeting point from srun's own variables."""
    out = tmp_path / "run"
    words = ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--chdir", str(Path.cwd())]
    cluster.run(*words, sys.executable, "-m", "runner", f"out={out}", *TINY, timeout=120)
    run = Result(out=out, code=0, text="")
    (start,) = run.journal("start")
    assert start["detail"]["hosts"] == {"nodeA": "0", "nodeB": "1"}
    assert_same_run(run, clean)


def test_the_script_in_the_checkout_is_what_the_command_prints() -> None:
    words = ["slurm", "--nodes", "2", "--python", ".venv/bin/python"]
    done = subprocess.run(
        [sys.executable, "-m", "runner", *words], capture_output=True, text=True, check=True
    )
    assert Path("launch/slurm.sbatch").read_text() == done.stdout

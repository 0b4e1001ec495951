"""Two nodes with a torchrun agent each, in network namespaces: one is lost, cut off, comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from runner.launch.kubernetes import Pods, job_set
from runner.launch.node_memory import NodeFolder
from runner.system.json_lines import read_lines
from tests import namespaces
from tests.conftest import MEMORY_DIR
from tests.drills.compare import assert_goes_on, assert_same_run
from tests.drills.conftest import remembered
from tests.drills.test_held_out_sets import text_file
from tests.drills.test_lost_data import forgetful, reached, trouble_of, why_not
from tests.drills.test_watch import told, watching
from tests.namespaces import Network
from tests.run import TINY, Result, environment_of, finish, metrics_step, naming, unbroken

REASON = namespaces.unavailable()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
    pytest.mark.usefixtures("leaves_nothing"),
]

# Different shapes of the same sums round differently: nats per token.
# A collective waits no longer than this; a silently cut link is noticed by nothing else.
TIMEOUT = 10
# Until the first step done by the smaller world, from the loss of the other node: some 7 s, and
# more where the processor is shared.
RECOVERY = 90.0
# Where no collective breaks, a lost node is noticed by nothing but the watchdog.
QUICK = ("watchdog.floor_seconds=20", "watchdog.slow_seconds=120")


@dataclass
class Job:
    """``runner launch`` on nodes of a network, all on one run."""

    network: Network
    out: Path
    options: tuple[str, ...]
    overrides: tuple[str, ...]
    logs: Path
    agents: dict[str, list[subprocess.Popen[bytes]]] = field(default_factory=dict)

    def start(self, *nodes: str) -> None:
        words = [sys.executable, "-m", "runner", "launch", "--nproc", "1", "--pause", "0.5"]
        told = unbroken([*QUICK, *self.overrides])
        command = [*words, *self.options, f"out={self.out}", *TINY, *told]
        for node in nodes:
            log = self.log(node)
            started = self.network.start(
                node, command, log=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
            self.agents.setdefault(node, []).append(started)

    def signal(self, node: str, number: int) -> None:
        for pid, words in self.network.processes(node).items():
            if " launch " in words and "nsenter" not in words:
                os.kill(pid, number)

    def log(self, node: str) -> Path:
        return self.logs / f"{node}.log"

    @property
    def text(self) -> str:
        logs = sorted(self.logs.glob("*.log"))
        return "\n".join(f"{path.name}:\n{path.read_text()[-2500:]}" for path in logs)

    def until(self, seen: Callable[[], object], what: str, timeout: float = 60) -> float:
        """Seconds until it was seen."""
        began = time.monotonic()
        while not seen():
            assert time.monotonic() - began < timeout, (
                f"not within {timeout:g} s: {what}{self.text}"
            )
            time.sleep(0.05)
        return time.monotonic() - began

    def until_step(self, step: int) -> None:
        self.until(lambda: metrics_step(self.out) >= step, f"step {step}\n")

    def worlds(self) -> list[int]:
        """World sizes of the starts so far."""
        lines, _ = read_lines(self.out / "journal.jsonl")
        return [line["detail"]["world_size"] for line in lines if line["kind"] == "start"]

    def until_world(self, *sizes: int, timeout: float = 60) -> float:
        wanted = list(sizes)
        return self.until(lambda: self.worlds() == wanted, f"worlds {wanted}\n", timeout)

    def wait(self, node: str, timeout: float = 90) -> Result:
        """The end of the newest agent of a node."""
        agent = self.agents[node][-1]
        self.until(lambda: agent.poll() is not None, f"the end on {node}\n", timeout)
        return Result(out=self.out, code=agent.returncode, text=self.text)


@pytest.fixture
def network(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Network]:
    """``indirect``: whether each node has a /dev/shm of its own."""
    names, own = ["nodeA", "nodeB", "nodeC"], getattr(request, "param", False)
    with Network(f"hn{os.getpid()}", names, tmp_path / "net", 77, own_memory=own) as up:
        yield up


@pytest.fixture
def job(network: Network, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes a job; at the end every agent must have gone and taken its processes along."""
    made: list[Job] = []

    def make(*overrides: str, nodes: str = "1:2", options: tuple[str, ...] = ()) -> Job:
        words = ("--nodes", nodes, "--head", "nodeA", "--name", "drill", *options)
        made.append(Job(network, tmp_path / "run", words, overrides, logs=tmp_path))
        return made[-1]

    yield make
    for one in made:
        for agents in one.agents.values():
            for agent in agents:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(20)
    left = {node: network.processes(node) for node in network.nodes}
    assert not any(left.values()), left


SLOW = "faults=[slow@step=1-60,seconds=0.25]"
CHECK = "cluster.burn_in_seconds=0"


@pytest.mark.twin
def test_a_lost_node_is_done_without_and_taken_back(
    network: Network, job: Callable[..., Job], clean: Result, tmp_path: Path
) -> None:
    """It died, and is remembered; there is no other to prefer. Outside, it is one episode."""
    folder, kept = tmp_path / "nodes", tmp_path / "told"
    # Not over before a busy machine has the node back.
    elastic = job("faults=[slow@step=12-40,seconds=1]", f"cluster.nodes={folder}", CHECK)
    with watching(elastic.out, kept, silent=300):
        elastic.start("nodeA", "nodeB")
        elastic.until_step(15)
        network.crash("nodeB")
        seconds = elastic.until_world(2, 1, timeout=RECOVERY)
        print(f"one node lost, training again after {seconds:.1f} s")
        before = metrics_step(elastic.out)
        elastic.until_step(before + 3)
        network.boot("nodeB")
        elastic.start("nodeB")
        seconds = elastic.until_world(2, 1, 2)
        print(f"taken back after {seconds:.1f} s")
        run = elastic.wait("nodeA")
        assert elastic.wait("nodeB").code == 0
        elastic.until(lambda: told(kept)[-1:] and told(kept)[-1]["kind"] == "done", "the end told")
    assert [one["kind"] for one in told(kept)] == ["crash", "recovered", "done"], told(kept)
    assert {(one.host, one.kind) for one in NodeFolder(folder).events()} == {("nodeB", "died")}
    assert_goes_on(run, clean)


@pytest.mark.twin
@pytest.mark.full
def test_a_cut_link_is_noticed_and_one_that_heals_brings_the_node_back(
    network: Network, job: Callable[..., Job], clean: Result
) -> None:
    """Nobody is told: packets vanish. The node cut off must not go on for itself."""
    elastic = job("faults=[slow@step=1-60,seconds=0.6]", f"parallel.timeout_seconds={TIMEOUT}")
    elastic.start("nodeA", "nodeB")
    elastic.until_step(10)
    network.cut("nodeB")
    elastic.until_world(2, 1, timeout=TIMEOUT + RECOVERY)
    network.heal("nodeB")
    seconds = elastic.until_world(2, 1, 2)
    print(f"link healed, taken back after {seconds:.1f} s")
    run = elastic.wait("nodeA")
    assert elastic.wait("nodeB").code == 0
    assert_goes_on(run, clean)


@pytest.mark.twin
@pytest.mark.full
def test_the_head_is_lost_and_the_supervisors_start_again(
    network: Network, job: Callable[..., Job], clean: Result
) -> None:
    """A fixed world: the other node waits at the head until it is back."""
    fixed = job(SLOW, nodes="2")
    fixed.start("nodeA", "nodeB")
    fixed.until_step(15)
    network.crash("nodeA")
    time.sleep(3)
    network.boot("nodeA")
    fixed.start("nodeA")
    seconds = fixed.until_world(2, 2)
    print(f"head lost, and {seconds:.1f} s after it was back training again")
    run = fixed.wait("nodeA")
    assert fixed.wait("nodeB").code == 0
    assert len(fixed.agents["nodeB"]) == 1, "its supervisor did it"
    assert_same_run(run, clean)


@pytest.mark.twin
@pytest.mark.full
@pytest.mark.parametrize(
    ("faults", "words"),
    [
        # Over NCCL no collective of the other node breaks, and it sees no process to look at.
        ("kill@step=30,rank=1", ("without a report: SIGKILL", "killed by signal 9")),
        ("abort@step=30,rank=1,at=backward", ("rank 1: Fatal Python error: Aborted",)),
        ("raise@step=30,rank=1,at=agree", ("rank 1: DrillError",)),
        ("hang@step=30,rank=1", ("rank 1 never entered",)),
        ("stop@step=30,rank=1", ("rank 1 does not answer",)),
    ],
)
def test_a_rank_that_ends_badly_is_replaced_on_both_nodes(
    faults: str, words: tuple[str, ...], network: Network, job: Callable[..., Job], clean: Result
) -> None:
    fixed = job(f"faults=[{faults}]", nodes="2")
    fixed.start("nodeA", "nodeB")
    run = fixed.wait("nodeA", timeout=400)
    assert fixed.wait("nodeB").code == 0
    assert run.summary["restarts"] == 1
    (crash,) = run.journal("crash")
    assert any(word in crash["reason"] for word in words), crash
    attempts = read_lines(run.out / "attempts.jsonl")[0]
    assert not any(line["code"] == 75 for line in attempts), attempts
    assert_same_run(run, clean)


@pytest.mark.twin
# Always in parts: a launch over two nodes above, a rank that goes on from memory in test_memory.py,
# the manifests in tests/mechanism/test_launch.py.
@pytest.mark.full
def test_pods_start_again_inside_and_keep_their_snapshots(tmp_path: Path, clean: Result) -> None:
    """The manifests' own command in each pod, whose /dev/shm ends with it."""
    # Snapshots are finished behind the steps: give a busy machine time for those before the kill.
    faults = "faults=[slow@step=29-33,seconds=0.3,kill@step=33,rank=1]"
    out, told = tmp_path / "run", [faults, "checkpoint.memory_every=1"]
    pods = Pods(name="d", image="holdfast", nodes=2, num_ranks=1)
    template = job_set(pods, [f"out={out}", *TINY, *unbroken([*QUICK, *told])])["spec"]
    pod = template["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    names = [f"d-node-0-{number}.d" for number in range(2)]
    env = {k: v for k, v in os.environ.items() if k != MEMORY_DIR} | {"OMP_NUM_THREADS": "1"}
    folder = tmp_path / "net"
    with Network(f"hp{os.getpid()}", names, folder, 78, own_memory=True) as network:
        command = [sys.executable, *container["command"][1:]]
        agents = [
            network.start(name, command, log=folder / f"{name}.log", env=env) for name in names
        ]
        codes = [agent.wait(200) for agent in agents]
    text = "\n".join((folder / f"{name}.log").read_text()[-2500:] for name in names)
    run = Result(out=out, code=max(codes), text=text)
    starts = run.journal("start")
    assert [line["detail"]["tier"] for line in starts] == [None, "memory"], text
    assert 20 < starts[1]["step"] <= 32 and starts[1]["detail"]["hosts"] == dict(
        zip(names, "01", strict=True)
    )
    assert_same_run(run, clean)


@pytest.mark.twin
@pytest.mark.full
@pytest.mark.parametrize(
    ("network", "node", "other"),
    [(False, "nodeB", "nodeA"), (True, "nodeB", "nodeA"), (True, "nodeA", "nodeB")],
    indirect=["network"],
    ids=["signal", "notice", "notice at the head"],
)
def test_one_node_is_asked_to_stop_and_the_other_goes_on(
    network: Network, node: str, other: str, job: Callable[..., Job], clean: Result,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """By a signal to its launcher; or a notice on it, which stands until the machine is gone."""
    elastic = job(SLOW, "preempt.notice=file:/dev/shm/leave")
    elastic.start("nodeA", "nodeB")
    elastic.until_step(15)
    if "notice" in request.node.name:
        touch = ["touch", "/dev/shm/leave"]
        network.start(node, touch, log=elastic.log("touch"), env=os.environ).wait()
    else:
        elastic.signal(node, signal.SIGUSR1)
    elastic.until_world(2, 1)
    assert_goes_on(elastic.wait(other), clean)
    assert elastic.wait(node).code == 75


@pytest.mark.twin
# Always in parts: tests/drills/test_audit.py names the rank, test_supervise.py has the node listed
# (test_a_device_that_computes_wrongly_is_found_before_a_step), tests/mechanism/test_left_out.py has
# it leave and not come back; a world that shrinks is test_a_lost_node_... above.
@pytest.mark.full
@pytest.mark.parametrize(("bad", "other"), [("nodeB", "nodeA"), ("nodeA", "nodeB")])
def test_a_node_that_computes_wrongly_is_left_out(
    bad: str, other: str, job: Callable[..., Job], clean: Result
) -> None:
    """The run goes on from before the fault, although one clean checkpoint is kept, a younger one:
    that of the last audit in which both agreed is not retired."""
    elastic = job(
        f"faults=[wrong@step=23,host={bad}]", "debug.audit_every=20", "checkpoint.keep=1",
        "checkpoint.memory_every=0",
    )  # fmt: skip
    elastic.start("nodeA", "nodeB")
    elastic.until_world(2, 1, timeout=RECOVERY)
    listed = (elastic.out / "bad_nodes").read_text()
    run = elastic.wait(other)
    assert_goes_on(run, clean)
    assert listed.startswith(f"{bad} ") and listed.count("hardware: ") == 1, listed
    (crash,) = run.journal("crash")
    assert crash["step"] == 40 and crash["detail"]["host"] == bad, crash
    assert "no longer gives the bits on which all agreed" in crash["reason"]
    starts = run.journal("start")
    assert 10 <= starts[1]["step"] <= 20, starts
    left = elastic.wait(bad)
    assert left.code == 1 and f"{bad} is left out" in elastic.log(bad).read_text()
    elastic.start(bad)
    refused = elastic.wait(bad)
    assert refused.code == 2 and "delete its line when it is mended" in refused.text


@pytest.mark.full
def test_a_node_whose_device_gives_nan_is_left_out(job: Callable[..., Job], clean: Result) -> None:
    """By the verdict on the bad step; nothing is skipped."""
    elastic = job("guard.remedy=verdict", "faults=[sticky@step=33,rank=1]")
    elastic.start("nodeA", "nodeB")
    elastic.until_world(2, 1, timeout=RECOVERY)
    listed = (elastic.out / "bad_nodes").read_text()
    run = elastic.wait("nodeB" if listed.startswith("nodeA ") else "nodeA")
    assert_goes_on(run, clean)
    (crash,) = run.journal("crash")
    assert crash["detail"]["cause"] == "hardware" and crash["ranks"] == [1], crash
    assert run.summary["skipped"] == []


def test_a_spare_is_preferred_to_a_node_that_failed_in_another_run(
    job: Callable[..., Job], clean: Result, tmp_path: Path
) -> None:
    """It is the head as well: the others meet there without it."""
    folder = tmp_path / "nodes"
    fixed = job(remembered(folder, "nodeA"), CHECK, nodes="2")
    fixed.start("nodeA", "nodeB", "nodeC")
    run = fixed.wait("nodeB")
    assert fixed.wait("nodeC").code == 0
    left = fixed.wait("nodeA")
    assert (
        left.code == 0 and "nodeA failed before (ECC), and lets other nodes go first" in left.text
    ), left.text
    (start,) = run.journal("start")
    assert set(start["detail"]["hosts"]) == {"nodeB", "nodeC"}, start
    assert_goes_on(run, clean)
    assert {event.kind for event in NodeFolder(folder).events()} == {"hardware", "passed"}


@pytest.mark.twin
@pytest.mark.full
def test_a_node_that_stands_by_takes_the_place_of_one_that_is_lost(
    network: Network, job: Callable[..., Job], clean: Result, tmp_path: Path
) -> None:
    """Without its patience, and though the others meet at it."""
    told = remembered(tmp_path / "nodes", "nodeA")
    fixed = job(SLOW, told, CHECK, "cluster.patience_seconds=3600", nodes="2")
    fixed.start("nodeA", "nodeB", "nodeC")
    fixed.until_step(15)
    network.crash("nodeC")
    run = fixed.wait("nodeA", timeout=RECOVERY + 90)
    assert fixed.wait("nodeB").code == 0
    hosts = [set(line["detail"]["hosts"]) for line in run.journal("start")]
    assert hosts == [{"nodeB", "nodeC"}, {"nodeA", "nodeB"}], run.tail
    assert_goes_on(run, clean)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_head_that_stands_by_is_stopped(
    number: int, network: Network, job: Callable[..., Job], tmp_path: Path
) -> None:
    """Nothing of it is left, also not the place where the others met."""
    told = remembered(tmp_path / "nodes", "nodeA")
    fixed = job("faults=[slow@step=1-60,seconds=1]", told, CHECK, nodes="2")
    fixed.start("nodeA", "nodeB", "nodeC")
    fixed.until_step(5)
    fixed.signal("nodeA", number)
    assert fixed.wait("nodeA").code != 0
    fixed.until(lambda: not network.processes("nodeA"), "nothing left on nodeA\n", 20)
    for node in ("nodeB", "nodeC"):
        fixed.signal(node, signal.SIGTERM)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A disk at ``tmp_path / "disk"``, mounted before there are namespaces: stopped, it hangs."""
    if reason := why_not():
        pytest.skip(reason)
    with forgetful(tmp_path / "backing", tmp_path / "disk") as process:
        yield process


@pytest.mark.twin
@pytest.mark.full
@pytest.mark.parametrize("begun", [True, False], ids=["later", "from the start"])
def test_a_disk_that_hangs_under_what_is_remembered_stops_nothing(
    begun: bool,
    disk: subprocess.Popen[bytes],
    job: Callable[..., Job],
    clean: Result,
    tmp_path: Path,
) -> None:
    told = remembered(tmp_path / "disk" / "nodes", "nodeA")
    faults = "faults=[kill@step=30,rank=1,slow@step=1-60,seconds=0.1]"
    fixed = job(told, CHECK, faults, nodes="2")
    if not begun:
        disk.send_signal(signal.SIGSTOP)
    fixed.start("nodeA", "nodeB")
    fixed.until_step(10)
    disk.send_signal(signal.SIGSTOP)
    run = fixed.wait("nodeA", timeout=RECOVERY + 90)
    assert fixed.wait("nodeB").code == 0
    for node in ("nodeA", "nodeB"):
        words = fixed.log(node).read_text()
        assert words.count("no answer within 10 s; the run goes on without") == 1, words
    assert len(run.journal("start")) == 2
    assert_goes_on(run, clean)


@pytest.mark.full
@pytest.mark.parametrize(
    ("seconds", "is_killed", "restarts"), [(3.0, False, 0), (9.0, False, 1), (5.0, True, 1)]
)
def test_storage_that_is_stale_on_two_nodes(
    disk: subprocess.Popen[bytes], job: Callable[..., Job], tmp_path: Path, seconds: float,
    is_killed: bool, restarts: int,
) -> None:  # fmt: skip
    """Run, text and tokens lie on it. A read waits for it, and so do both supervisors where it
    was gone for longer, or where a rank died meanwhile."""
    place, mount = trouble_of(tmp_path / "backing"), tmp_path / "disk"
    text_file(tmp_path / "backing" / "corpus.txt", words=20_000, seed=1)
    text = mount / "corpus.txt"
    words = ("data=text", f"data.path={text}", f"data.cache={mount}/cache", "eval.every=10")
    clean = finish(tmp_path / "clean", *words)
    fixed = job(*words, "faults=[slow@step=14-60,seconds=0.2]", nodes="2")
    fixed.out = mount / "run"
    fixed.start("nodeA", "nodeB")
    fixed.until(lambda: reached(14)(fixed.out), "step 14\n")
    rank = next(pid for pid in naming(f"out={fixed.out}") if environment_of(pid).get("RANK") == "1")
    place.write_text("ESTALE *")
    if is_killed:
        os.kill(rank, signal.SIGKILL)
    time.sleep(seconds)
    place.unlink()
    run = fixed.wait("nodeA", timeout=RECOVERY + 90)
    assert fixed.wait("nodeB").code == 0
    assert run.code == 0, run.tail
    assert_same_run(run, clean)
    assert run.summary["restarts"] == restarts
    assert 'File "' not in run.text, run.text


@pytest.mark.full
def test_no_job_is_starved_by_what_is_remembered(
    job: Callable[..., Job], clean: Result, tmp_path: Path
) -> None:
    """Both failed before, and there is no spare: they take part, without their patience."""
    told = remembered(tmp_path / "nodes", "nodeA", "nodeB")
    fixed = job(told, CHECK, "cluster.patience_seconds=3600", nodes="2")
    fixed.start("nodeA", "nodeB")
    run = fixed.wait("nodeA")
    assert fixed.wait("nodeB").code == 0
    for node in ("nodeA", "nodeB"):
        assert "takes part: no better node is free" in fixed.log(node).read_text()
    assert_goes_on(run, clean)


@pytest.mark.twin
@pytest.mark.full
def test_a_node_that_fails_gives_its_place_to_a_spare_and_is_remembered(
    job: Callable[..., Job], clean: Result, tmp_path: Path
) -> None:
    """It passes the check of its devices: what is wrong shows only in training."""
    folder = tmp_path / "nodes"
    fixed = job(
        f"cluster.nodes={folder}", CHECK, "debug.audit_every=20", "checkpoint.keep=1",
        "faults=[wrong@step=23,host=nodeB]", "checkpoint.memory_every=0",
        nodes="2",
    )  # fmt: skip
    fixed.start("nodeA", "nodeB")
    fixed.until_step(5)
    fixed.start("nodeC")
    run = fixed.wait("nodeA", timeout=RECOVERY)
    for node in ("nodeB", "nodeC"):
        assert fixed.wait(node).code == 0, fixed.text
    hosts = [set(line["detail"]["hosts"]) for line in run.journal("start")]
    assert hosts == [{"nodeA", "nodeB"}, {"nodeA", "nodeC"}], run.tail
    events = [event for event in NodeFolder(folder).events() if event.kind == "hardware"]
    assert [event.host for event in events] == ["nodeB"], events
    assert "and lets other nodes go first" in fixed.log("nodeB").read_text()
    assert_goes_on(run, clean)

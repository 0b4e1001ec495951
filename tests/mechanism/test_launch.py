"""What is composed for launchers: torchrun's command, batch scripts, manifests, chosen nodes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import (
    TrainerV1alpha1TrainingRuntime,
)

from runner.__main__ import main
from runner.launch import slurm, torchrun
from runner.launch.crash_evidence import BadNodes
from runner.launch.slurm import announce, meeting
from runner.policy.nodes import choose
from runner.system.error import ConfigError
from tests import golden
from tests.programs import ended

SCHEMAS = {
    "JobSet": JobsetV1alpha2JobSet,
    "TrainJob": TrainerV1alpha1TrainJob,
    "TrainingRuntime": TrainerV1alpha1TrainingRuntime,
}
Printed = Callable[..., str]


ROOT = Path(__file__).parents[2]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    def run(*words: str) -> str:
        assert main(words) == 0
        return capsys.readouterr().out

    return run


def manifests(printed: Printed, *words: str) -> list[dict[str, Any]]:
    text = printed("k8s", "--image", "example/holdfast:1", *words)
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--nodes", "4", "--nproc", "8", "--gpus", "--claim", "runs", "--namespace", "team"),
        ("--nodes", "2", "--resource", "cpu=8", "--resource", "memory=16Gi"),
    ],
)
def test_manifests_fit_their_schemas(printed: Printed, kind: str, options: Sequence[str]) -> None:
    """Types and required fields are checked; a field that the schema lacks would get lost."""
    for manifest in manifests(printed, "--kind", kind, *options, "out=/runs/a", "model=tiny"):
        model = SCHEMAS[manifest["kind"]].from_dict(manifest)
        assert model is not None and model.to_dict() == manifest


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_exit_codes_decide_about_a_restart(printed: Printed, kind: str) -> None:
    manifest = manifests(printed, "--kind", kind, "--nodes", "3")[0]
    spec = manifest["spec"]["template"]["spec"] if kind == "trainjob" else manifest["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == job["parallelism"] == 3 and job["backoffLimit"] == 0
    on_exit = [rule["onExitCodes"]["values"] for rule in job["podFailurePolicy"]["rules"][:2]]
    assert on_exit == [[2, 3, 4], [75]]
    preempted, final = spec["failurePolicy"]["rules"]
    assert preempted["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert any("exit code 75 " in words for words in preempted["onJobFailureMessagePatterns"])
    assert final["action"] == "FailJobSet" and "onJobFailureMessagePatterns" not in final
    assert all(rule["onJobFailureReasons"] == ["PodFailurePolicy"] for rule in (preempted, final))
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "podFailurePolicy demands it"
    assert "holdfast-node-0-0.holdfast:29400" in pod["containers"][0]["command"]


def test_the_batch_script(printed: Printed) -> None:
    text = printed(
        *("slurm", "--nodes", "4", "--spares", "1", "--time", "4:00:00", "--chain", "3"),
        *("--sbatch", "gpus-per-node=8", "--python", "python3", "out=a b", "model=tiny"),
    )
    golden.same(text)
    alone = printed("slurm", "--nodes", "4").splitlines()
    assert "#SBATCH --nodes=4" in alone and not any("no-kill" in line for line in alone)


@pytest.mark.parametrize(
    ("bad", "lost", "chosen"),
    [
        ([], [], ["a", "b"]),
        (["a"], [], ["b", "c"]),
        ([], ["b"], ["a", "c"]),
        (["a"], ["b"], ["a", "c"]),
        (["a", "b", "c"], [], ["a", "b"]),
        ([], ["a", "b"], None),
    ],
)
def test_two_of_three_nodes(bad: list[str], lost: list[str], chosen: list[str] | None) -> None:
    assert choose(["a", "b", "c"], count=2, bad=bad, lost=lost) == chosen


def test_the_list_of_bad_nodes_is_a_file_to_edit(tmp_path: Path) -> None:
    bad = BadNodes(tmp_path / "run")
    assert bad.read() == {}
    bad.add([], "nothing")
    assert not (tmp_path / "run").exists()
    bad.add(["b"], "died")
    bad.add(["b", "a"], "fell silent")
    lines = (tmp_path / "run" / "bad_nodes").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["b", "a"] and lines[0].endswith(" died")
    (tmp_path / "run" / "bad_nodes").write_text(f"# mended\n\n{lines[1]}")
    bad.add(["c"], "died")
    assert list(bad.read()) == ["a", "c"]


def test_what_a_slurm_node_is_told(tmp_path: Path) -> None:
    file = tmp_path / "names"
    told = announce([("n7", "10.0.0.7"), ("n9", "10.0.0.9")], 20001, file=file)
    assert not file.exists()
    first = meeting(told | {"SLURMD_NODENAME": "n7"})
    other = meeting(told | {"SLURMD_NODENAME": "n9"})
    assert first is not None and other is not None
    assert first.hosts and not other.hosts
    assert first.head == other.head == ("10.0.0.7", 20001)
    assert other.local_address == "10.0.0.9" and other.num_nodes == 2
    assert (first.number, other.number) == (0, 1)
    assert meeting({"SLURMD_NODENAME": "n7"}) is None and meeting(told) is None


def test_names_of_a_large_allocation_are_in_a_file(tmp_path: Path) -> None:
    """Linux starts no program with a variable of 128 KiB: about 4,500 nodes."""
    pairs = [(f"gpu{n:05d}", f"10.1.{n // 250}.{n % 250}") for n in range(8000)]
    told = announce(pairs, 20001, file=tmp_path / "names")
    assert max(map(len, told.values())) < 1000
    assert subprocess.run(["true"], env=told, check=True).returncode == 0
    found = meeting(told | {"SLURMD_NODENAME": "gpu07999"})
    assert found is not None and (found.num_nodes, found.number) == (8000, 7999)
    (tmp_path / "names").unlink()
    with pytest.raises(ConfigError, match="out must lie where every node sees it"):
        meeting(told | {"SLURMD_NODENAME": "gpu07999"})


def test_slurm_is_asked_about_many_nodes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(words: list[str], *, text: str | None = None) -> str:
        asked.append(words)
        names = words[-1].removeprefix("--nodes=").split(",")
        if words[0] == "sinfo":
            return "\n".join(f"{name} {'down' if name == 'n7' else 'idle'}" for name in names)
        return "\n".join(f"NodeName={name} NodeAddr=a{name}" for name in names)

    monkeypatch.setattr(slurm, "_run", run)
    nodes = [f"n{number}" for number in range(1000)]
    assert slurm.addresses(nodes) == {node: f"a{node}" for node in nodes}
    assert slurm.unusable(nodes) == {"n7"}
    assert len(asked) == 6 and max(len(words[-1]) for words in asked) < 1 << 14


def agent(nodes: str, **options: Any) -> torchrun.Agent:
    return torchrun.Agent(nodes=torchrun.parse_nodes(nodes), num_ranks=2, **options)


def test_torchrun_on_many_numbered_nodes() -> None:
    """They need not agree on numbers: on 2,048 nodes that alone would keep the store busy."""
    head = ("10.0.0.7", 20001)
    words = torchrun.command(agent("64", head=head, name="x", number=63), [])
    assert {"--nnodes=64", "--node-rank=63", "--rdzv-backend=static", "--master-port=20001"} <= set(
        words
    )
    for few in (agent("63", head=head, number=3), agent("64", head=head), agent("1:64", head=head)):
        assert "--rdzv-backend=c10d" in torchrun.command(few, [])


@pytest.mark.full
def test_numbered_nodes_meet_and_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real agents with numbers, as from the 64th node on."""
    monkeypatch.setattr(torchrun, "STATIC_FROM_NODES", 2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    settings = [f"out={tmp_path / 'run'}", "data=synthetic", "model=tiny", "steps=3"]
    settings += ["data.seq_len=32", "batch.global_size=4", "data.workers=0"]
    made = []
    for number in range(2):
        one = torchrun.Agent(
            nodes=torchrun.parse_nodes("2"), num_ranks=1, head=("127.0.0.1", port), name="x",
            local_address="127.0.0.1", number=number,
        )  # fmt: skip
        given = torchrun.environment({**os.environ, "OMP_NUM_THREADS": "1"}, one)
        words = torchrun.command(one, settings)
        assert "--rdzv-backend=static" in words
        made.append(subprocess.Popen(words, env=given, cwd=ROOT))
    assert [process.wait(600) for process in made] == [0, 0]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3


@pytest.mark.parametrize(("nodes", "interval"), [(2, 1), (64, 1), (300, 6), (1000, 48)])
def test_signs_of_life_are_as_rare_as_nodes_are_many(nodes: int, interval: int) -> None:
    words = torchrun.command(agent(str(nodes), head=("10.0.0.7", 20001)), [])
    [conf] = [word for word in words if word.startswith("--rdzv-conf=")]
    assert f"keep_alive_interval={interval}," in conf


def test_torchrun_on_nodes_that_come_and_go() -> None:
    head = ("127.0.0.1", 29400)
    words = torchrun.command(agent("1:2", head=head, name="x", local_address="h"), [])
    assert {"--nnodes=1:2", "--max-restarts=3", "--rdzv-endpoint=127.0.0.1:29400"} <= set(words)
    assert "--local-addr=h" in words
    (conf,) = [word for word in words if word.startswith("--rdzv-conf=")]
    for setting in ("last_call_timeout=3", "keep_alive_interval=1", "keep_alive_max_attempt=3",
                    "is_host=1"):  # fmt: skip
        assert setting in conf
    given = {"PET_NNODES": "7", "OMP_NUM_THREADS": "3", "HOME": "/h"}
    made = torchrun.environment(given, agent("1:2"))
    assert made == {
        "OMP_NUM_THREADS": "3", "HOME": "/h", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }  # fmt: skip


def test_the_shell_around_it_adds_nothing(
    printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # which gives the meeting its name
    words = ["--print", "--nproc", "2", "--nodes", "2:4", "--head", "127.0.0.1", "model=tiny"]
    script = Path(__file__).parents[2] / "launch" / "torchrun.sh"
    done = ended("bash", str(script), *words, cwd=tmp_path, check=True)
    assert "--nnodes=2:4" in done.stdout
    assert done.stdout.split()[1:] == printed("launch", *words).split()[1:]


def test_who_is_the_head_is_found_by_address() -> None:
    assert torchrun.is_here("127.0.0.1") and torchrun.is_here(socket.gethostname())
    assert not torchrun.is_here("192.0.2.1"), "an address for documentation, nobody's"
    assert not torchrun.is_here("no-such-host.invalid")


def test_heads() -> None:
    assert torchrun.parse_head("nodeA") == ("nodeA", 29400)
    assert torchrun.parse_head("nodeA:7") == ("nodeA", 7)
    for text in ("nodeA:", ":7", "nodeA:x", "nodeA:70000"):
        with pytest.raises(ConfigError, match="--head"):
            torchrun.parse_head(text)


@pytest.mark.parametrize(
    ("words", "is_torchrun"),
    [
        ("python -m torch.distributed.run --standalone -m runner out=a", True),
        ("/opt/venv/bin/torchrun --nproc-per-node=8 -m runner out=a", True),
        ("python -m runner.launch.agent --nnodes=2:4 -m runner out=a", True),
        ("python -m runner out=torchrun", False),
        ("bash train.sh", False),
    ],
)
def test_a_torchrun_command_is_known(words: str, is_torchrun: bool) -> None:
    assert torchrun.is_started_by(words.split()) is is_torchrun


def test_a_supervisor_imports_no_torch() -> None:
    """It would begin a second later, and hold 200 MB on every node."""
    names = "runner.command.supervise, runner.command.cluster"
    code = f"import sys, {names}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

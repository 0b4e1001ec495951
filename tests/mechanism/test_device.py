"""Which device a rank takes; none goes to the CPU alone. No GPU is here: torch is made to say."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.distributed import device as module
from runner.distributed import rendezvous
from runner.distributed.device import device_facts, device_versions, find_device
from runner.distributed.env import RankEnv, place_from
from runner.distributed.rendezvous import _require_own_gpus, difference, start_group
from runner.engine import zero
from runner.launch import torchrun
from runner.run_dir.time_account import past
from runner.session.inventory import start_incident
from runner.system.environment import variables
from runner.system.error import ConfigError, StartError
from tests.run import train

CPU = torch.device("cpu")
SLURM = {"SLURM_GPUS_ON_NODE": "8"}


def place(local_rank: int = 3, ranks_here: int = 8) -> RankEnv:
    return RankEnv(
        rank=8 + local_rank, world_size=16, local_rank=local_rank, local_world_size=ranks_here
    )


@pytest.fixture(autouse=True)
def starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)


@pytest.mark.parametrize(
    ("wanted", "seen", "ranks_here", "environment", "found", "problem"),
    [
        ("auto", 0, 8, {}, "cpu", ""),
        ("cpu", 8, 8, SLURM, "cpu", ""),
        ("auto", 8, 8, {}, "cuda:3", ""),
        ("cuda", 8, 4, {}, "cuda:3", ""),
        # Each task sees a GPU of its own, whatever its number among the tasks is.
        ("auto", 1, 8, SLURM | {"CUDA_VISIBLE_DEVICES": "5"}, "cuda:0", ""),
        # One fell off the bus.
        ("auto", 7, 8, {}, "cpu", "8 ranks but 7 GPUs"),
        ("cuda", 7, 8, {}, "cpu", "8 ranks but 7 GPUs"),
        # The driver did not load.
        ("auto", 0, 8, SLURM, "cpu", "SLURM_GPUS_ON_NODE=8"),
        ("auto", 0, 8, {"SLURM_JOB_GPUS": "0,1"}, "cpu", "SLURM_JOB_GPUS=0,1"),
        ("auto", 0, 8, {"NVIDIA_VISIBLE_DEVICES": "GPU-5a"}, "cpu", "NVIDIA_VISIBLE_DEVICES"),
        ("auto", 0, 8, {"NVIDIA_VISIBLE_DEVICES": "all", "SLURM_GPUS_ON_NODE": "0"}, "cpu", ""),
        ("cuda", 0, 8, {}, "cpu", "torch sees no GPU, but parallel.device=cuda"),
    ],
)
def test_the_table(
    wanted: str,
    seen: int,
    ranks_here: int,
    environment: dict[str, str],
    found: str,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(module, "host_name", lambda: "gpu07")
    told = find_device(wanted, place(3, ranks_here), environment)
    assert told.device == torch.device(found) and problem in told.problem
    assert bool(told.problem) == bool(problem)
    assert told.problem.startswith("gpu07: ") or not problem


@pytest.mark.parametrize(
    ("environment", "is_told"), [({}, True), ({"CUDA_VISIBLE_DEVICES": ""}, False)]
)
def test_a_driver_that_knows_gpus_which_torch_does_not_see(
    environment: dict[str, str], is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpus" / "0000:3b:00.0").mkdir(parents=True)
    monkeypatch.setattr(module, "_DRIVER", tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert ("nvidia-smi" in find_device("auto", place(), environment).problem) == is_told


class Gpus:
    """What torch would say of 8 GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int = 8) -> None:
        (tmp_path / "version").write_text(
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26\n"
        )
        monkeypatch.setattr(module, "_DRIVER", tmp_path)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
        monkeypatch.setattr(
            torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 28, 9)), raising=False
        )
        monkeypatch.setattr(torch.version, "cuda", "12.8")


def test_one_node_that_differs_is_named_to_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the roll call, which compares what each rank tells of its device."""
    Gpus(monkeypatch, tmp_path)
    well = device_versions(find_device("auto", place(), {}))
    assert well == {"device": "cuda", "cuda": "12.8", "nccl": "2.28.9"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    monkeypatch.setattr(module, "host_name", lambda: "gpu07")
    ill = device_versions(find_device("auto", place(), {}))
    words = difference([*[well] * 8, ill])
    assert "device: rank 8: gpu07: 8 ranks but 7 GPUs" in words and "the others: cuda" in words
    words = difference([well, {**well, "cuda": "12.6"}, well])
    assert words == "cuda: rank 1: 12.6; the others: 12.8"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    words = difference([well, device_versions(find_device("auto", place(), {})), well])
    assert "device: rank 1: cpu; the others: cuda" in words


def test_another_driver_or_gpu_is_warned_of_and_not_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A cluster rolls its driver out node by node."""
    Gpus(monkeypatch, tmp_path)
    gpu = torch.device("cuda", 3)
    facts, versions = device_facts(gpu), device_versions(find_device("auto", place(), {}))
    assert facts == {"gpu": "NVIDIA H100 80GB HBM3", "gpus": "8", "driver": "570.124.06"}
    assert not facts.keys() & versions.keys() and device_facts(CPU) == {}
    lines: list[str] = []
    gathered = [{"host": "a", **facts}, {"host": "b", **facts, "driver": "565.57.01"}]
    group: Any = SimpleNamespace(
        ranks=SimpleNamespace(gather=lambda _: gathered, from_first=lambda value: value),
        console=SimpleNamespace(say=lines.append),
        place=place(), device=gpu, device_versions=versions, debug={},
        times=SimpleNamespace(seconds=dict),
    )  # fmt: skip
    lease: Any = SimpleNamespace(number=1)
    resumed: Any = SimpleNamespace(step=0)
    identity = SimpleNamespace(config_digest="", data_fingerprint="")
    run: Any = SimpleNamespace(group=group, lease=lease, identity=identity, resumed=resumed)
    start = start_incident(run, past([], [], []), reason="", parallel="")
    assert list(start.detail["hosts"]) == ["a", "b"]
    [line] = lines
    assert line.startswith("warning: ") and "driver: rank 1: 565.57.01" in line


@pytest.mark.parametrize(
    ("cuda", "words", "expected"),
    [
        ("13.0", "The NVIDIA driver on your system is too old (found version 12020).\nPlease",
         "built for CUDA 13.0, which needs driver 580 or newer, and this machine has driver 570.1"),
        ("14.0", "no CUDA-capable device", "CUDA 14.0, and this machine has driver 570.124.06 (no"),
    ],
)  # fmt: skip
def test_gpus_with_which_cuda_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str, words: str, expected: str
) -> None:
    """They are counted all the same."""
    Gpus(monkeypatch, tmp_path)

    def init() -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    problem = find_device("auto", place(), {}).problem
    assert expected in problem and "\n" not in problem and "docs/running.md" in problem
    assert find_device("cpu", place(), {}).problem == ""


@pytest.mark.parametrize("ranks", [2, pytest.param(0, marks=pytest.mark.full)])
def test_a_run_on_such_gpus_ends_in_one_sentence(ranks: int, tmp_path: Path) -> None:
    """With this torch, which is built without CUDA, and GPUs that it counts."""
    program = tmp_path / "counts.py"
    program.write_text(
        "import torch\n"
        "torch.cuda.device_count = lambda: 2\n"
        "from runner.__main__ import run\n"
        "run()\n"
    )
    ended = train(tmp_path / "run", program=program, ranks=ranks)
    assert ended.code == (1 if ranks else 2), ended.tail
    assert "runner/distributed" not in ended.text, "a traceback other than torchrun's own"
    assert "CUDA does not start: torch" in ended.text and "use parallel.device=cpu" in ended.text


def test_what_is_wrong_on_every_rank_is_refused_by_all() -> None:
    with pytest.raises(ConfigError, match="gpu07: 8 ranks but 7 GPUs"):
        start_group(place_from({}), CPU, timeout_seconds=20, problem="gpu07: 8 ranks but 7 GPUs")


@pytest.mark.parametrize("name", ["cuda:3", "cpu"])
def test_nccls_communicator_is_made_at_the_start(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the start is watched, not in the first collective; and in time, or it is given up."""

    class Asked(Exception):
        pass

    def init(backend: str, **options: Any) -> None:
        raise Asked(backend, options["device_id"], options["timeout"].total_seconds())

    monkeypatch.setattr(rendezvous.dist, "init_process_group", init)
    with pytest.raises(Asked) as asked:
        start_group(place_from({}), torch.device(name), timeout_seconds=20)
    is_gpu = name != "cpu"
    backend = "cpu:gloo,cuda:nccl" if is_gpu else "gloo"
    assert asked.value.args == (backend, torch.device(name) if is_gpu else None, 20.0)


def test_two_ranks_on_one_gpu_are_named() -> None:
    _require_own_gpus([{"rank": 8, "gpu": "GPU-5a"}, {"rank": 9, "gpu": "GPU-7b"}])
    _require_own_gpus([{"rank": 8, "gpu": ""}, {"rank": 9, "gpu": ""}])
    with pytest.raises(StartError, match=r"ranks 8 and 9: GPU-5a.*one rank a GPU"):
        _require_own_gpus([{"rank": 8, "gpu": "GPU-5a"}, {"rank": 9, "gpu": "GPU-5a"}])


@pytest.mark.parametrize(
    ("seen", "environment", "ranks", "words"),
    [
        (8, {}, 8, ""),
        (8, SLURM, 8, ""),
        (0, {}, 2, ""),
        (7, SLURM, 0, "8 GPUs on this node"),
        (0, SLURM, 0, "torch sees 0"),
        (0, {"SLURM_JOB_GPUS": "0,1"}, 0, "torch sees none"),
    ],
)
def test_how_many_ranks_a_node_starts(
    seen: int, environment: dict[str, str], ranks: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not two on a node whose driver failed, while the others start eight."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    if not words:
        assert torchrun.num_ranks_here(environment) == ranks
        return
    with pytest.raises(ConfigError, match=words):
        torchrun.num_ranks_here(environment)


@pytest.mark.parametrize(
    ("device", "before", "told"),
    [
        (torch.device("cuda", 3), None, "3"),  # plain srun: LOCAL_RANK is torchrun's
        (torch.device("cuda", 0), "3", "0"),  # each task sees one GPU
        (CPU, None, "0"),
        (CPU, "1", "1"),
    ],
)
def test_deepspeed_takes_this_ranks_gpu(
    device: torch.device, before: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", before or "")  # set, so that it is put back as it was
    if before is None:
        monkeypatch.delenv("LOCAL_RANK")
    ops = SimpleNamespace(__compatible_ops__={})
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(ops=ops))
    zero._deepspeed(device)
    assert variables()["LOCAL_RANK"] == told

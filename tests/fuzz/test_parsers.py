"""Whatever the bytes are that a parser is given, only our own errors come out, and soon.

A hundred inputs or so a parser always, thousands with ``--full``.
"""

from __future__ import annotations

import hashlib
import json
import math
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.checkpoint.disk.shards import stamps, verify_files
from runner.config.compose import compose, from_yaml, to_yaml
from runner.config.schema import DataConfig, GuardConfig, RunConfig
from runner.config.validate import check
from runner.convert.weights import open_source
from runner.data.cursor import SampleStream
from runner.data.tokens import open_tokens
from runner.distributed.env import JobEnv, launch_from, place_from, rendezvous_endpoint
from runner.fault.spec import KINDS, parse_faults
from runner.health.cause_reporter import unexplained
from runner.health.rank_report import Report, read_fatal_log, read_reports
from runner.health.root_cause import find_root_cause
from runner.observe.journal import Journal, read_journal
from runner.policy.decision.skip_ledger import Ledger
from runner.run_dir.lease import RunLease, acquire, newest_number
from runner.run_dir.paths import RunDir
from runner.startup.resume import _serial_in
from runner.system.error import DataError, RunnerError
from runner.system.json_lines import read_lines, step_of
from runner.system.process import own_process
from runner.train.state import TrainState
from tests.fuzz.mutate import WORDS, as_json, changed, damaged, hostile
from tests.mechanism.test_journal import DISCARD, ROLLBACK, START
from tests.mechanism.test_memory import later, node, slot_file, taken
from tests.mechanism.test_ring_on_disk import tensors, write
from tests.stored import metrics_line, read_range

TRIED: list[int] = []  # by the running test
MOST_GROWTH_KIB = 1 << 20  # of this process's memory over one test

often = pytest.mark.parametrize("num", [80, pytest.param(3000, marks=pytest.mark.full)])
slowly = pytest.mark.parametrize("num", [25, pytest.param(1000, marks=pytest.mark.full)])


@pytest.fixture(autouse=True)
def watched(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """No test may take the memory; how many inputs it tried is told at the end."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    TRIED.clear()
    yield
    record_property("inputs", sum(TRIED))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_GROWTH_KIB


def try_all(num: int, inputs: st.SearchStrategy[Any], work: Callable[[Any], object]) -> None:
    """``work`` may refuse an input in our own words, and in no others."""
    tried = 0

    @settings(
        max_examples=num, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(inputs)
    def one(value: Any) -> None:
        nonlocal tried
        tried += 1
        try:
            work(value)
        except RunnerError as error:
            assert str(error) and len(str(error)) < 20_000

    one()
    assert tried >= min(num, 20)
    TRIED.append(tried)


def written(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Work that writes an input into a file, and has it read."""

    def work(data: bytes) -> None:
        path.write_bytes(data)
        read(path)

    return work


# The ring


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ring = tmp_path_factory.mktemp("fuzz") / "ring"
    write(ring, tensors(), cuts={"param/a": [4, 9]})
    [folder] = ring.iterdir()
    return folder


def read_all(folder: Path, manifest: bytes) -> None:
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "COMMITTED").write_text(hashlib.sha256(manifest).hexdigest())
    entries, damaged_ones = CheckpointDirectory(folder.parent).entries()
    assert len(entries) + len(damaged_ones) == 1
    for entry in entries:
        names = sorted(entry.manifest.files)
        verify_files(entry, names, finite=True, seen=stamps(entry, names))
        for name in entry.manifest.shapes:
            read_range(entry, name, 0, entry.manifest.numel(name))


@often
def test_manifests(num: int, checkpoint: Path) -> None:
    sound = (checkpoint / "manifest.json").read_bytes()
    tree = json.loads(sound)
    for inputs in (changed(tree).map(as_json), damaged(sound)):
        try_all(num, inputs, lambda data: read_all(checkpoint, data))
        read_all(checkpoint, as_json(tree))  # for the next; it must still be sound


# Snapshots in memory


def read_header_of(base: Path, data: bytes) -> None:
    """As a later incarnation would."""
    slot_file(base, "json").write_bytes(data)
    next_one = later(base)
    found, refused = next_one.left_by(3)
    assert len(found) + len(refused) == 1
    for serial in found:
        next_one.adopt(3, serial, 0)


@often
def test_headers(num: int, tmp_path: Path) -> None:
    taken(tmp_path)
    sound = slot_file(tmp_path, "json").read_bytes()
    tree = json.loads(sound.partition(b"\n")[2])

    def work(data: bytes) -> None:
        read_header_of(tmp_path, hashlib.sha256(data).hexdigest().encode() + b"\n" + data)

    try_all(num, changed(tree).map(as_json), work)
    try_all(num, damaged(sound), lambda data: read_header_of(tmp_path, data))


@often
def test_owner_of_snapshots(num: int, tmp_path: Path) -> None:
    taken(tmp_path)
    path = slot_file(tmp_path).with_name("owner.json")
    sound = json.loads(path.read_text())
    other = node(tmp_path, "cd" * 16)
    other.open()

    def work(data: bytes) -> None:
        if path.parent.is_dir():
            path.write_bytes(data)
        else:
            taken(tmp_path)
        later(tmp_path).left_by(3)
        other.sweep()

    try_all(num, st.one_of(changed(sound).map(as_json), damaged(as_json(sound))), work)


@often
def test_marker(num: int, checkpoint: Path) -> None:
    sound = (checkpoint / "COMMITTED").read_bytes()

    def work(data: bytes) -> None:
        (checkpoint / "COMMITTED").write_bytes(data)
        CheckpointDirectory(checkpoint.parent).entries()

    try_all(num, st.one_of(damaged(sound), st.binary(max_size=80)), work)
    (checkpoint / "COMMITTED").write_bytes(sound)


@often
def test_folder_names(num: int, tmp_path: Path) -> None:
    write(tmp_path / "ring", tensors())
    [folder] = (tmp_path / "ring").iterdir()
    names = st.from_regex(r"\w{1,9}-step-\w{1,9}", fullmatch=True) | st.text(
        st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=40
    ).filter(lambda name: name not in (".", ".."))

    def work(name: str) -> None:
        other = folder.with_name(name)
        folder.rename(other)
        entries, _ = CheckpointDirectory(folder.parent).entries()
        assert not entries or name == folder.name
        other.rename(folder)

    try_all(num, names, work)


@often
def test_train_state(num: int) -> None:
    def fresh() -> TrainState:
        return TrainState(GuardConfig())

    stopped = fresh()
    stopped.came_again = 5
    stopped.unreported = metrics_line(4, loss=math.nan, norm_limit=4.0, columns={"samples/web": 3})
    loaded = fresh()
    loaded.load_json(json.loads(json.dumps(stopped.to_json())))
    assert repr(loaded.unreported) == repr(stopped.unreported) and loaded.came_again == 5
    try_all(num, changed(stopped.to_json()), lambda tree: fresh().load_json(tree))


# Journal, metrics, settings


def journal_lines() -> list[dict[str, Any]]:
    crash = START.to_json() | {"kind": "crash", "detail": {"incarnation": 1}}
    head = {"seq": 0, "time": 1.7e9, "attempt": 1}
    start = START.to_json() | {"detail": {"incarnation": 2, "world_size": 2, "next_serial": 4}}
    return [head | line for line in (start, DISCARD.to_json(), ROLLBACK.to_json(), crash)]


def restart_from(run_dir: RunDir, data: bytes) -> None:
    run_dir.journal.write_bytes(data)
    lines, _ = read_journal(run_dir.journal)
    json.loads(json.dumps(lines))
    journal = Journal(lines, told_to_skip=(), file=None)
    journal.history.abandoned_serials()
    journal.history.discards_from(0)
    journal.history.last_rollback_to(1)
    assert journal.began >= 0
    assert all(_serial_in(line) < 10**12 for line in lines)
    unexplained(run_dir, lines, 3)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


@often
def test_journals(num: int, run_dir: RunDir) -> None:
    inputs = changed(journal_lines()).map(lambda tree: b"".join(as_json(v) + b"\n" for v in tree))
    try_all(num, inputs, lambda data: restart_from(run_dir, data))
    sound = b"".join(as_json(line) + b"\n" for line in journal_lines())
    restart_from(run_dir, sound)
    try_all(num, damaged(sound), lambda data: restart_from(run_dir, data))


@often
def test_metrics(num: int, tmp_path: Path) -> None:
    line = {"step": 3, "loss": 2.5, "samples": [0, 32]}
    path = tmp_path / "metrics.jsonl"

    def work(data: bytes) -> None:
        path.write_bytes(data)
        lines, length = read_lines(path)
        assert length <= len(data)
        assert all(0 <= step_of(found) < 2**63 for found in lines)

    sound = as_json(line) + b"\n" + as_json(line) + b"\n"
    try_all(num, changed([line, line]).map(lambda t: b"\n".join(map(as_json, t))), work)
    try_all(num, damaged(sound), work)


@often
def test_stored_settings(num: int, run_dir: RunDir) -> None:
    config = RunConfig()
    sound = to_yaml(config).encode()
    run_dir.config.write_bytes(sound)
    assert run_dir.settings_changed(config) == {}

    def work(data: bytes) -> None:
        run_dir.config.write_bytes(data)
        run_dir.refuse_change(run_dir.settings_changed(config), config)

    lines = st.sampled_from(
        ["_target_: os.system\n", "a: &a [1]\nb: *a\n", "out: ${oc.env:HOME}\n", "model: 3\n",
         "x: !!python/object/apply:os.system ['true']\n", "a: {{{{\n", "? [1]\n: 2\n", "1: 2\n",
         "steps: :50\n"]
    )  # fmt: skip
    short = b"\n".join(sound.splitlines()[:30]) + b"\n"
    inputs = damaged(short) | lines.map(str.encode) | lines.map(lambda text: short + text.encode())
    try_all(num, inputs, work)
    try_all(num, changed(json.loads(json.dumps({"model": {"dim": 1}, "steps": 4}))), plain_settings)


def plain_settings(tree: Any) -> None:
    from_yaml(json.dumps(tree), source=Path("config.yaml"))


@slowly
def test_overrides(num: int) -> None:
    keys = st.sampled_from(
        ["steps", "model.dim", "data.skip", "data.path", "faults", "parallel.deepspeed", "model",
         "+x", "~model", "++model._target_", "+model._target_", "out", "hydra.run.dir", "optim.lr"]
    )  # fmt: skip
    values = st.sampled_from(
        [*WORDS[:12], "[[0,1]]", "[[1,0]]", "{a:1}", "[" * 300, "${x}", "1e999"]
    )
    texts = st.tuples(keys, values | st.text(max_size=10)).map("=".join) | st.text(max_size=20)

    def work(overrides: list[str]) -> None:
        config = compose(overrides)
        assert type(config) is RunConfig
        check(config, world_size=1)

    deep = "[" * 100 + "]" * 100
    for known in ("~=[]", "++={}", f"data.path={deep}", "@model=tiny", "~guard.window", "A.(="):
        with pytest.raises(RunnerError):
            work([known])
    try_all(num, st.lists(texts, min_size=1, max_size=2), work)


@often
def test_skipped_ranges(num: int) -> None:
    def work(value: Any) -> None:
        config = RunConfig()
        config.data.skip = value if isinstance(value, list) else [value]
        check(config, world_size=1)
        ledger = Ledger((start, stop) for start, stop in config.data.skip)
        stream = SampleStream.of_one(num_samples=1000, seed=0, held_out_share=0.0, global_size=8)
        plan = stream.plan(0, ledger)
        assert plan is not None

    pairs = st.lists(
        st.sampled_from([0, 1, -1, 7, 10**9, 2**60, 2**63, 10**40, True, 0.5]), max_size=3
    )
    try_all(num, st.lists(pairs, max_size=3) | hostile, work)


@often
def test_faults(num: int) -> None:
    parts = st.sampled_from(
        ["kill", "spike", "poison", "slow", "nan_grad", "@", "=", ",", "-", "step", "samples",
         "rank", "scale", "seconds", "at", "fetch", "1", "99999999999999999999", "nan", "inf",
         "1e400", "²", "\u0662", "-1", "0x1", " ", "\n", "1_0"]
    )  # fmt: skip
    texts = st.lists(parts, max_size=10).map("".join) | st.text(max_size=30)
    sound = st.sampled_from(["kill@step=3,rank=1,at=save", "spike@samples=3-9,scale=50"])
    edited = sound.flatmap(lambda text: damaged(text.encode())).map(lambda d: d.decode("latin-1"))

    def work(given: list[str]) -> None:
        for fault in parse_faults(given):
            assert fault.kind in KINDS and 0 <= fault.steps[0] <= fault.steps[1]
            assert math.isfinite(fault.seconds) and math.isfinite(fault.scale)

    try_all(num, st.lists(texts | edited, min_size=1, max_size=2), work)


# Token files


def open_corpus(path: Path) -> None:
    is_isolated = path.suffix == ".idx"
    data = open_tokens(
        DataConfig(path=[str(path)], vocab_size=100, seq_len=4, isolate_documents=is_isolated)
    )
    for index in range(len(data)):
        assert data[index].tokens.shape == (5,)
    data.fingerprint()


@often
def test_megatron(num: int, tmp_path: Path) -> None:
    lengths, pointers = [6, 5, 9], [0, 12, 22]
    sound = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    sound += np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes()
    sound += np.array([0, 1, 2, 3], "<i8").tobytes()
    path = tmp_path / "corpus.idx"
    path.with_suffix(".bin").write_bytes(np.arange(20, dtype="<u2").tobytes())
    work = written(path, open_corpus)
    work(sound)
    try_all(num, damaged(sound), work)
    fields = st.lists(
        st.tuples(
            st.integers(9, len(sound) - 8),
            st.sampled_from(
                [0, 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64 // 12, 2**61]
            ),
        ),
        min_size=1,
        max_size=3,
    )

    def with_fields(values: list[tuple[int, int]]) -> bytes:
        made = bytearray(sound)
        for at, value in values:
            made[at : at + 8] = value.to_bytes(8, "little")
        return bytes(made)

    try_all(num, fields.map(with_fields), work)


@often
def test_npy(num: int, tmp_path: Path) -> None:
    path = tmp_path / "corpus.npy"
    np.save(path, np.arange(40, dtype="<u2"))
    sound, work = path.read_bytes(), written(path, open_corpus)
    work(sound)
    with pytest.raises(DataError):  # tokenize.TokenError from inside numpy
        work(sound[:125] + b"\0\0[")
    headers = st.sampled_from(
        ["{'descr': '<u2', 'fortran_order': False, 'shape': (" + size + ",)}"
         for size in ("10**20", "-1", "True", "2**99", "1e3", "9" * 30, "'a'", "0", "4,5")]
        + ["{'descr': '|O', 'fortran_order': False, 'shape': (40,)}", "(" * 4000,
           "__import__('os')", "{'descr': [('a','<u2')], 'fortran_order': False, 'shape': (40,)}",
           "{", "1" * 9000]
    )  # fmt: skip
    made = headers.map(lambda h: b"\x93NUMPY\x01\x00" + struct.pack("<H", len(h)) + h.encode())
    try_all(num, damaged(sound) | made.map(lambda head: head + bytes(80)), work)


# What ranks and launchers leave


def report() -> dict[str, Any]:
    frame = {"file": "runner/train/step.py", "line": 3, "function": "step"}
    entry = {
        "group": "0", "seq": 4, "op": "all_reduce", "sizes": [[2, 3]], "dtypes": ["Float"],
        "finished": False, "state": "scheduled", "line": "a.py:3 f",
    }  # fmt: skip
    return asdict(
        Report(
            rank=0,
            world_size=2,
            kind="hang",
            step=3,
            phase="forward",
            stacks=[{"thread": "MainThread", "frames": [frame]}],
            collectives=[entry, entry | {"seq": 5}],
        )
    )


def explain(folder: Path, data: bytes) -> None:
    (folder / "rank-00000.json").write_bytes(data)
    (folder / "rank-00001.json").write_bytes(as_json(report() | {"rank": 1, "collectives": []}))
    reports = read_reports(folder)
    assert len(reports) in (1, 2)
    find_root_cause(reports, 2)
    for found in reports:
        assert isinstance(found.where, str)


@often
def test_reports(num: int, tmp_path: Path) -> None:
    explain(tmp_path, as_json(report()))
    assert len(read_reports(tmp_path)) == 2
    try_all(num, changed(report()).map(as_json), lambda data: explain(tmp_path, data))
    try_all(num, damaged(as_json(report())), lambda data: explain(tmp_path, data))


@often
def test_last_words(num: int, run_dir: RunDir) -> None:
    sound = (
        b"Fatal Python error: Aborted\n\nThread 0x00007f (most recent call first):\n"
        b'  File "/a/runner/__main__.py", line 12 in main\n  File "x.py", line 99999 in f\n'
    )
    seen = Report(rank=0, world_size=2, kind="fatal", step=0, phase="a phase")

    def work(data: bytes) -> None:
        path = run_dir.fatal(1, 0)
        path.write_bytes(data)
        found = read_fatal_log(path, seen)
        assert found is None or isinstance(found.where, str)
        unexplained(run_dir, [], 2)

    (run_dir.debug / "fatal-000001-rank-x.txt").write_text("not a number")
    (run_dir.debug / "fatal-000001-rank-²²²²².txt").write_text("nor this")
    try_all(num, damaged(sound) | st.binary(max_size=60), work)


ALONE = JobEnv(job="slurm x 4", order=(0, 0), step="0", end_time=None, has_agent=False)


@often
def test_claims(num: int, tmp_path: Path) -> None:
    claim = {"job": "slurm x 4", "order": [0, 0], "step": "1", "time": 1.7e9, **own_process()}
    claim |= {"pid": 2**22 + 5}

    def work(given: tuple[bytes, bytes, str]) -> None:
        folder = tmp_path / "incarnation"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        data, beat, name = given
        (folder / f"{name}.json").write_bytes(data)
        (folder / "beat").write_bytes(beat)
        newest = newest_number(folder)
        fence = acquire(folder, ALONE, stale_seconds=0.002, take_over=False, say=len)
        assert fence.number == newest + 1
        RunLease(folder, 1).check()  # Superseded, where the hostile claim is number 2

    data = changed(claim).map(as_json) | damaged(as_json(claim))
    names = st.sampled_from(
        ["000001", "000002", "0x", "1", "0" * 40, "9999999", "9" * 60, "00000²"]
    )
    try_all(num, st.tuples(data, st.binary(max_size=9), names), work)


@often
def test_launcher_variables(num: int) -> None:
    values = st.sampled_from(
        ["0", "1", "2", "-1", "", "²", "\u0662", "9" * 30, "9" * 5000, "1e3", "nan", "2(x2)",
         "1(x9999999)", "2(x999999999999)", "1,1,1", "x", "node[1-", "70000", "0x10", "1_0", " 1"]
    )  # fmt: skip
    names = [
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_JOB_ID", "SLURM_STEP_ID",
        "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID",
        "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "MASTER_ADDR", "MASTER_PORT",
        "SLURM_RESTART_COUNT", "SLURM_JOB_END_TIME", "HOLDFAST_ATTEMPT", "HOLDFAST_END_TIME",
        "TORCHELASTIC_RUN_ID",
    ]  # fmt: skip
    sound = {
        "SLURM_JOB_ID": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2",
    }  # fmt: skip

    def work(environment: dict[str, str]) -> None:
        launch_from(environment)
        place = place_from(environment)
        assert 0 <= place.rank < place.world_size
        assert 0 <= place.local_rank < place.local_world_size <= place.world_size
        rendezvous_endpoint(environment)

    def meet(environment: dict[str, str]) -> None:
        rendezvous_endpoint(environment)

    some = st.dictionaries(st.sampled_from(names), values, max_size=6)
    try_all(num, some | some.map(lambda extra: sound | extra), work)
    try_all(num, some.map(lambda extra: sound | extra), meet)


# Other programs' files


def import_all(path: Path) -> None:
    weights = open_source(path)
    for name, shape in weights.shapes.items():
        if np.prod(shape, dtype=float) < 1e6:  # a caller compares shapes before it reads
            weights.read(name, 0, math.prod(shape))


@often
def test_safetensors(num: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.arange(6.0), "b": torch.ones(2, 3)}, path)
    sound, work = path.read_bytes(), written(path, import_all)
    work(sound)
    try_all(num, damaged(sound), work)

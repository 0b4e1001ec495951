"""P3, P4, P6 with an object store behind the ring: a real S3 server that fails in every way."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drills.compare import assert_every_sample_once, assert_same_end, assert_same_run
from tests.drills.conftest import POISON
from tests.rows import full
from tests.run import LIMITS, Result, finish, start, train
from tests.store import BUCKET, Store, once

URL = f"s3://{BUCKET}/drill"
REMOTE = (f"checkpoint.remote={URL}", "checkpoint.remote_wait_seconds=40")


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.stop()


def assert_clean_copies(store: Store, run: Result) -> None:
    """What the store holds are checkpoints that are clean in ``out``, byte for byte."""
    held = {
        key.removeprefix("drill/ring/"): data for key, data in store.held("drill/ring/").items()
    }
    folders = {key.split("/")[0] for key in held}
    ring = run.out / "ring"
    assert folders and all((ring / folder / "CLEAN").exists() for folder in folders)
    last = f"-step-{run.summary['steps']:08d}"
    assert any(folder.endswith(last) for folder in folders), "the end state is proven, and sent"
    for folder in folders:
        for path in (ring / folder).iterdir():
            assert held.pop(f"{folder}/{path.name}") == path.read_bytes(), path
    assert {key.split("/", 1)[1] for key in held} == {
        "run/journal.jsonl", "run/metrics.jsonl", "run/config.yaml", "run/files.json",
    }  # fmt: skip
    assert any((path / "TAINTED").exists() or path.name not in folders for path in ring.iterdir())


@pytest.fixture(scope="module")
def sent(store: Store, runs: Path) -> Result:
    """A poisoned run that rolls back; the server dies in the middle of an upload and returns."""
    store.dies_at = 16  # in the second upload
    back = store.comes_back()
    out = runs / "sent"
    overrides = (POISON, "checkpoint.keep=9", *REMOTE)
    result = train(out, *overrides, env=store.env)
    assert result.code == 0 and store.died.is_set(), result.tail
    back.join()
    return result


def test_the_server_dies_in_the_middle_of_an_upload(
    store: Store, sent: Result, poisoned: Result
) -> None:
    assert store.died.is_set(), sent.tail
    assert_same_run(sent, poisoned)
    assert sent.summary["rollbacks"] == 1
    assert_clean_copies(store, sent)
    parts = [key for key in store.puts if key.endswith(".bin")]
    assert len(parts) == len(set(parts)), "what had arrived was sent again"
    written = "".join(
        path.read_text(errors="replace") for path in sent.out.glob("*") if path.is_file()
    )
    for secret in ("a-very-secret-key", "an-access-key"):
        assert secret not in written + sent.text
        assert not any(secret.encode() in data for data in store.held("drill/").values())


def test_a_lost_directory_is_taken_back_past_a_damaged_object(
    store: Store, sent: Result, poisoned: Result, runs: Path
) -> None:
    newest = max(key for key in store.held("drill/ring/") if key.endswith("rank-00001.bin"))
    data = bytearray(store.get(newest))
    data[len(data) // 2] ^= 1
    store.put(newest, bytes(data))
    shutil.move(sent.out, runs / "sent-before")
    run = train(sent.out, POISON, "checkpoint.keep=9", *REMOTE, env=store.env)
    assert run.code == 0, run.tail
    assert_same_end(run, poisoned)
    assert_every_sample_once(run)
    for key in ("cursor", "skipped", "rollbacks", "discarded_steps"):
        assert run.summary[key] == poisoned.summary[key], key
    # If only the beginning had been sent, its steps now have the limits that the guard holds since
    # the rollback; the first time it was not armed yet.
    lines, wanted = (
        [{key: value for key, value in line.items() if key not in LIMITS} for line in one.metrics()]
        for one in (run, poisoned)
    )
    assert lines == wanted, run.tail
    (damage,), (restored,) = run.journal("checkpoint_damaged"), run.journal("restored")
    assert "rank-00001.bin: digest differs" in damage["reason"] and URL in restored["reason"]
    assert "restored: out had no usable checkpoint" in run.text
    assert run.summary["incarnation"] == 2 and not run.journal("crash")


def test_a_server_that_is_down_changes_nothing_and_is_told(
    store: Store, clean: Result, runs: Path
) -> None:
    env = store.env | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}  # nobody listens there
    told = (f"checkpoint.remote={URL}", "checkpoint.remote_wait_seconds=2")
    refused = train(runs / "down", *told, env=env)
    assert refused.code == 1, refused.tail
    assert "does not answer" in refused.text and "resume.without_remote=true" in refused.text
    assert not (runs / "down" / "metrics.jsonl").exists(), "not a step was made"
    run = train(runs / "down", *told, "resume.without_remote=true", env=env)
    assert run.code == 0, run.tail
    assert_same_run(run, clean)
    failed = run.journal("upload_failed")
    assert failed and all("go on" in line["decision"] for line in failed), run.tail
    assert any("not finished within 2 s" in line["reason"] for line in failed) or any(
        "Could not connect" in line["reason"] for line in failed
    )
    (silence,) = run.journal("remote_unreachable")
    assert "no answer within 2 s" in silence["reason"] or "127.0.0.1:9" in silence["reason"]


@pytest.mark.full
def test_a_silent_server_is_waited_for_longer_than_a_collective(store: Store, runs: Path) -> None:
    """Only the first rank asks it, four times within 21 s."""
    env = store.env | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    waits = ("checkpoint.remote_wait_seconds=60", "parallel.timeout_seconds=10")
    refused = train(runs / "silent", f"checkpoint.remote={URL}", *waits, env=env)
    assert refused.code == 1 and "does not answer" in refused.text, refused.tail


@pytest.mark.full
def test_a_run_killed_in_an_upload_goes_on_with_it(store: Store, clean: Result, runs: Path) -> None:
    out, url = runs / "killed-sending", f"checkpoint.remote=s3://{BUCKET}/killed"
    before = len(store.puts)
    started = start(out, url, env=store.env)
    started.until(lambda _: any("/rank-" in key for key in store.puts[before:]))
    started.kill()
    started.wait()
    run = train(out, url, env=store.env)
    assert run.code == 0, run.tail
    assert_same_end(run, clean)
    parts = [key for key in store.puts[before:] if key.endswith(".bin")]
    assert len(parts) == len(set(parts))


@pytest.mark.full
def test_a_ring_damaged_as_a_whole_is_replaced_from_the_store(
    store: Store, clean: Result, runs: Path
) -> None:
    out, url = runs / "ring-rots", f"checkpoint.remote=s3://{BUCKET}/rots"
    finish_with = train(out, url, "steps=40", "schedule.total=60", env=store.env)
    assert finish_with.code == 0, finish_with.tail
    for path in (out / "ring").rglob("rank-00000.bin"):
        path.write_bytes(b"\1" + path.read_bytes()[1:])
    run = train(out, url, env=store.env)
    assert run.code == 0, run.tail
    assert_same_end(run, clean)
    assert run.journal("restored") and len(run.journal("checkpoint_damaged")) >= 3


@pytest.mark.full
def test_another_run_is_refused_the_same_place(store: Store, runs: Path) -> None:
    url = f"checkpoint.remote=s3://{BUCKET}/refused"
    one = train(runs / "first-there", url, "steps=20", ranks=0, env=store.env)
    assert one.code == 0, one.tail
    finish(runs / "second-there", "steps=20", ranks=0)
    for out, overrides, words in (
        ("second-there", ["steps=20"], "has the checkpoints of a different run"),
        ("third-there", ["steps=20", "seed=3"], "seed: was 0, now 3"),
    ):
        refused = train(runs / out, url, *overrides, ranks=0, env=store.env)
        assert refused.code == 2 and words in refused.text, refused.tail


@pytest.mark.parametrize(
    "trouble", ["slow down", *(full(one) for one in ("late", "cut", "lost", "short"))]
)
def test_two_jobs_in_one_bucket_whose_store_is_in_trouble(
    store: Store, clean_alone: Result, runs: Path, trouble: str
) -> None:
    """At once, and each request meets it; neither touches what is the other's."""
    place = trouble.replace(" ", "-")
    outs = [runs / f"{place}-{name}" for name in ("job", "job-2")]  # one name begins the other
    store.trouble = once(trouble, *(("GET",) if trouble == "short" else ()))
    try:
        jobs = []
        for out in outs:
            url = f"checkpoint.remote=s3://{BUCKET}/{out.name}"
            words = (url, "checkpoint.remote_wait_seconds=200")
            jobs.append(start(out, *words, ranks=0, env=store.env))
        ended = [job.wait() for job in jobs]
    finally:
        store.trouble = lambda asked: ""
    assert store.met[trouble] > 50, store.met
    for run in ended:
        assert run.code == 0, run.tail
        assert_same_run(run, clean_alone)
        assert not run.journal("upload_failed"), run.tail
        held = store.held(f"{run.out.name}/ring/")
        last = {key for key in held if "-step-00000060/" in key}
        assert last and len(last) < len(held)
        for key in last:
            path = run.out / key.removeprefix(f"{run.out.name}/")
            assert "/run/" in key or held[key] == path.read_bytes(), key


@pytest.mark.parametrize(
    "trouble", ["refused", *(full(one) for one in ("slow down", "late", "lost", "short"))]
)
def test_a_store_in_trouble_when_a_run_is_taken_back(
    store: Store, clean_alone: Result, runs: Path, trouble: str
) -> None:
    """Each request meets it, but for "refused": there one object of the newest checkpoint does."""
    out = runs / f"back-{trouble.replace(' ', '-')}"
    words = (f"checkpoint.remote=s3://{BUCKET}/{out.name}", "checkpoint.remote_wait_seconds=200")
    first = train(out, *words, "steps=40", "schedule.total=60", ranks=0, env=store.env)
    assert first.code == 0, first.tail
    shutil.rmtree(out)
    is_lasting = trouble == "refused"
    newest = "-step-00000040/rank-00000.bin"
    store.trouble = (
        (lambda asked: trouble if asked["PATH_INFO"].endswith(newest) else "")
        if is_lasting
        else once(trouble)
    )
    try:
        run = train(out, *words, ranks=0, env=store.env)
    finally:
        store.trouble = lambda asked: ""
    assert run.code == 0, run.tail
    assert store.met[trouble] >= (1 if is_lasting else 5), store.met
    assert_same_end(run, clean_alone)
    (restored,) = run.journal("restored")
    assert (restored["step"] < 40) == is_lasting, run.tail
    left_out = [line["reason"] for line in run.journal("remote_unreachable")]
    assert bool(left_out) == is_lasting and all(newest in one for one in left_out), left_out
    ahead = [line["reason"] for line in run.journal("remote_ahead")]
    assert bool(ahead) == is_lasting, ahead


@pytest.mark.full
def test_an_old_copy_of_a_run_says_that_the_store_is_ahead(
    store: Store, clean_alone: Result, runs: Path
) -> None:
    out = runs / "old-copy"
    words = (f"checkpoint.remote=s3://{BUCKET}/{out.name}", "schedule.total=60")
    for steps in (20, 40):
        ended = train(out, *words, f"steps={steps}", ranks=0, env=store.env)
        assert ended.code == 0, ended.tail
        if steps == 20:
            shutil.copytree(out, runs / "copied")
    shutil.rmtree(out)
    shutil.move(runs / "copied", out)
    run = train(out, *words, ranks=0, env=store.env)
    assert run.code == 0, run.tail
    assert_same_end(run, clean_alone)
    (told,) = run.journal("remote_ahead")
    assert "of step 40, and this start goes on from step 20" in told["reason"], told

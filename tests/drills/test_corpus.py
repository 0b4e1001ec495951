"""A corpus that is made into tokens by one rank for all, and one that is changed behind the run."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.run import finish, start, train

# Tokenising takes as long as is wanted, and each process that does it leaves a file.
SLOW = """
import os, sys, time
from pathlib import Path

from runner.__main__ import main
from runner.data import text as cache
from runner.health.leave import leave

build, batches = cache._build, cache._batches
seconds, folder = {seconds}, Path({folder!r})

def building(*arguments):
    folder.mkdir(exist_ok=True)
    (folder / ("rank-" + os.environ["RANK"])).write_text(str(os.getpid()))
    build(*arguments)

def slowly(pieces):
    for batch in batches(pieces):
        time.sleep(seconds / 4)
        yield batch

cache._build, cache._batches, cache._BATCH_PIECES = building, slowly, 250
leave(main(sys.argv[1:]))
"""


def jsonl(path: Path, *, num_lines: int = 1000) -> Path:
    lines = [
        json.dumps({"text": f"line {number} of a poem, not of prose"})
        for number in range(num_lines)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def told(tmp_path: Path, corpus: Path) -> tuple[str, ...]:
    return (
        "data.kind=text",
        f"data.path={corpus}",
        f"data.cache={tmp_path / 'cache'}",
        "compute.precision=fp32",
        "steps=5",
    )


def program(tmp_path: Path, seconds: float) -> Path:
    made = tmp_path / "slow.py"
    made.write_text(SLOW.format(seconds=seconds, folder=str(tmp_path / "built")))
    return made


def built(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "built").glob("*"))


def test_an_error_of_the_rank_that_tokenises_is_every_rank_s(tmp_path: Path) -> None:
    corpus = jsonl(tmp_path / "a.jsonl")
    with corpus.open("a") as out:
        out.write('{"body": "x"}\n')
    refused = train(tmp_path / "run", *told(tmp_path, corpus))
    assert refused.code != 0
    words = f"error: {corpus} line 1001: has no 'text' (data.field)"
    before, found, _ = refused.text.partition(words)
    assert found and "Traceback" not in before, refused.tail  # gloo of torch 2.10 has a line there
    assert refused.text.count("Traceback") == 1, "torchrun's own"
    assert "exitcode  : 2" in refused.text, refused.tail
    assert not list((tmp_path / "cache").iterdir()), "nothing is left of it"


def test_a_killed_tokenisation_leaves_nothing_that_counts(tmp_path: Path) -> None:
    settings = told(tmp_path, jsonl(tmp_path / "a.jsonl"))
    started = start(tmp_path / "run", *settings, program=program(tmp_path, 60.0))
    started.until(lambda _: bool(built(tmp_path)))
    time.sleep(1.0)
    started.kill()
    killed = started.wait()
    assert killed.code != 0
    left = [path.name for path in (tmp_path / "cache").iterdir()]
    assert left and all(name.startswith(".") for name in left), left
    finish(tmp_path / "run", *settings, ranks=0)  # at once: its owner is dead on this machine
    assert [path.name[0] != "." for path in (tmp_path / "cache").iterdir()] == [True], "swept"


def test_a_stop_while_tokens_are_made_is_heard(tmp_path: Path) -> None:
    settings = told(tmp_path, jsonl(tmp_path / "a.jsonl"))
    started = start(tmp_path / "run", *settings, ranks=0, program=alone(tmp_path))
    started.until(lambda _: bool(built(tmp_path)))
    os.kill(started.process.pid, signal.SIGTERM)
    stopped = started.wait()
    assert stopped.code == 75, stopped.tail
    assert "asked to stop (rank 0: SIGTERM) while the data was prepared" in stopped.text
    assert not list((tmp_path / "cache").iterdir()), "nothing is left of it"


def alone(tmp_path: Path) -> Path:
    made = program(tmp_path, 8.0)
    made.write_text(made.read_text().replace('os.environ["RANK"]', '"0"'))
    return made


# -- a corpus that is changed in place

NUM_TOKENS = 34_000_000  # 68 MB of uint16: over what is read whole at the start


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "corpus.bin"
    np.random.default_rng(1).integers(0, 64, size=NUM_TOKENS, dtype=np.uint16).tofile(path)
    return path


def zero_between_the_samples(path: Path) -> float:
    """As an unsynced write would leave it; the share of zeroed bytes."""
    size, block = path.stat().st_size, 16 << 10
    zeroed = 0
    with path.open("r+b") as file:
        for number in range(63):
            start = (size - block) * number // 63 + block
            stop = (size - block) * (number + 1) // 63
            file.seek(start)
            file.write(bytes(stop - start))
            zeroed += stop - start
    return zeroed / size


def of_tokens(path: Path, cache: Path, steps: int) -> tuple[str, ...]:
    return (
        "data.kind=tokens",
        f"data.path={path}",
        f"data.cache={cache}",
        "data.token_dtype=uint16",
        "data.vocab_size=64",
        "compute.precision=fp32",
        "schedule.total=40",
        f"steps={steps}",
    )


def test_a_corpus_changed_in_place_is_found_before_anything_is_proven(
    tmp_path: Path, large: Path
) -> None:
    path, cache = tmp_path / "corpus.bin", tmp_path / "cache"
    path.write_bytes(large.read_bytes())
    whole = finish(tmp_path / "whole", *of_tokens(path, cache, 40))
    out = tmp_path / "run"
    first = finish(out, *of_tokens(path, cache, 20))
    [line] = first.journal("data_digest")
    assert line["detail"]["bytes"] == 2 * NUM_TOKENS

    assert zero_between_the_samples(path) > 0.98
    refused = train(out, *of_tokens(path, cache, 40))
    assert refused.code != 0
    assert refused.summary["exit_code"] == 2, refused.tail
    assert "corpus is not the one that this run began on: corpus.bin changed" in refused.text
    [changed] = refused.journal("data_changed")
    assert changed["detail"]["sha256"] != line["detail"]["sha256"]
    states = ring_states(out)
    assert all(state == "tainted" for step, state in states.items() if step > 20), states
    assert states[20] != "tainted", states

    path.write_bytes(large.read_bytes())
    again = finish(out, *of_tokens(path, cache, 40))
    assert again.digest == whole.digest, again.tail
    assert len(again.journal("data_digest")) == 1, "known, and not told again"


def ring_states(out: Path) -> dict[int, str]:
    from runner.checkpoint.disk.directory import CheckpointDirectory

    entries, _ = CheckpointDirectory(out / "ring", owner=0, check=lambda: None).entries()
    return {entry.record.step: entry.record.state.value for entry in entries}

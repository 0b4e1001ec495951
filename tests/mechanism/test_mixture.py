"""Several sources in one stream: what stands where, and that nothing is read twice or left out."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.config.compose import compose
from runner.config.mappings import sources_of
from runner.config.schema import RunConfig
from runner.config.validate import check
from runner.data.cursor import SampleStream
from runner.data.mixture import BLOCK, MixtureOrder, Phase, split
from runner.observe.journal import Journal, read_journal
from runner.policy.decision.history import Incident
from runner.policy.decision.skip_ledger import Ledger
from runner.run_dir.paths import RunDir
from runner.session.corpus import open_dataset, sample_stream
from runner.startup.resume import refuse_gone_sources, settle_mixture
from runner.system.error import ConfigError, DataError
from runner.system.json_lines import LineFile
from runner.train.state import TrainState

LENGTHS = {"books": 700, "code": 90, "web": 5000}
WEIGHTS = {"books": 1.0, "code": 0.5, "web": 3.5}


def order(
    weights: Mapping[str, float] = WEIGHTS,
    *,
    phases: Sequence[Phase] = (),
    lengths: Mapping[str, int] = LENGTHS,
    seed: int = 3,
    share: float = 0.0,
) -> MixtureOrder:
    made = MixtureOrder(lengths, seed=seed, held_out_share=share, weights=weights)
    if phases:
        made.load(phases)
    return made


def read(one: MixtureOrder, start: int, stop: int) -> list[tuple[str, int]]:
    """Source and index within it at each position."""
    indices = one.indices(np.arange(start, stop, dtype=np.int64))
    sources = one.sources(indices)
    offsets = one._offsets
    return [
        (one.names[source], int(index - offsets[source]))
        for source, index in zip(sources.tolist(), indices.tolist(), strict=True)
    ]


def require_whole_epochs(samples: Sequence[tuple[str, int]], lengths: Mapping[str, int]) -> None:
    """Of each source every sample is read once before any is read again."""
    for name, length in lengths.items():
        own = [index for source, index in samples if source == name]
        for at in range(0, len(own), length):
            epoch = own[at : at + length]
            assert len(set(epoch)) == len(epoch), f"{name}: a sample twice in an epoch"
            assert len(epoch) < length or sorted(epoch) == list(range(length))


@pytest.mark.parametrize("number", [1, 100, BLOCK, BLOCK + 1, 3 * BLOCK + 777, 20_000])
def test_counts_are_within_three_sigma_of_the_weights(number: int) -> None:
    found = Counter(name for name, _ in read(order(), 0, number))
    total = sum(WEIGHTS.values())
    for name, weight in WEIGHTS.items():
        share = weight / total
        sigma = math.sqrt(number * share * (1 - share))
        assert abs(found[name] - number * share) <= 3 * sigma + 1, (name, found)


def test_sources_are_mixed_and_not_in_turn() -> None:
    """As a hash would, but for whole blocks: neighbours tell nothing of each other."""
    names = [name for name, _ in read(order({"books": 1, "web": 1}), 0, BLOCK)]
    same = sum(a == b for a, b in pairwise(names)) / (len(names) - 1)
    assert 0.45 < same < 0.55
    assert names.count("books") == BLOCK // 2
    for world_size in (2, 4, 8):
        assert 0.4 < names[::world_size].count("web") / len(names[::world_size]) < 0.6


def test_every_sample_of_a_source_is_read_once_an_epoch() -> None:
    samples = read(order(), 0, 30_000)
    require_whole_epochs(samples, LENGTHS)
    code = [index for name, index in samples if name == "code"]
    assert code[:90] != code[90:180], "each epoch in an order of its own"


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_changed_weights_repeat_and_lose_nothing(data: Any) -> None:
    starts = sorted(data.draw(st.sets(st.integers(1, 3 * BLOCK), max_size=3)))
    weights = st.fixed_dictionaries(
        {name: st.sampled_from([0.0, 0.2, 1.0, 7.0]) for name in LENGTHS}
    )
    phases = [
        Phase(start=start, weights=data.draw(weights.filter(lambda w: sum(w.values()) > 0)))
        for start in [0, *starts]
    ]
    one = order(phases=phases)
    samples = read(one, 0, 4 * BLOCK)
    require_whole_epochs(samples, LENGTHS)
    for phase, end in zip(phases, [*starts, 4 * BLOCK], strict=True):
        seen = {name for name, _ in samples[phase.start : end]}
        assert seen <= {name for name, weight in phase.weights.items() if weight > 0}


def test_what_lies_before_a_change_stays_as_it_was() -> None:
    """A rollback behind it reads what was read then."""
    before = read(order(), 0, 6000)
    first, second = Phase(start=0, weights=WEIGHTS), Phase(start=5000, weights={"code": 1})
    changed = order(phases=[first, second])
    assert read(changed, 0, 5000) == before[:5000]
    assert {name for name, _ in read(changed, 5000, 6000)} == {"code"}
    again = order(phases=[first, second, Phase(start=4000, weights=WEIGHTS)])
    without = order(phases=[first, Phase(start=4000, weights=WEIGHTS)])
    assert read(again, 0, 6000) == read(without, 0, 6000), "the second began behind the run's end"
    third = Phase(start=5500, weights={"books": 1})
    again = order(phases=[first, second, third, Phase(start=4000, weights=WEIGHTS)])
    assert read(again, 0, 6000) == read(without, 0, 6000), "nor does the third one's place tell"
    require_whole_epochs(read(again, 0, 20_000), LENGTHS)


def test_a_position_does_not_depend_on_what_was_asked_before() -> None:
    one, far = order(), 10**12
    there = read(one, far, far + 64)
    assert read(order(), far, far + 64) == there
    read(one, 0, 40 * BLOCK)
    assert one._block.cache_info().currsize <= 16, "nothing grows"
    assert read(one, far, far + 64) == there
    mixed = np.array([5, far + 3, 4097, 0], dtype=np.int64)
    assert one.indices(mixed).tolist() == [int(one.indices(mixed[i : i + 1])[0]) for i in range(4)]


@given(
    total=st.integers(0, 10**6),
    shares=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=6).filter(any),
)
@settings(max_examples=100, deadline=None)
def test_a_split_adds_up_and_only_grows(total: int, shares: list[int]) -> None:
    one, two = split(total, shares), split(total + 1, shares)
    assert sum(one) == total and sum(two) == total + 1
    assert all(after - before in (0, 1) for before, after in zip(one, two, strict=True))
    for share, count in zip(shares, one, strict=True):
        assert abs(count - total * share / sum(shares)) <= len(shares)


def test_held_out_samples_are_of_each_source_and_never_read() -> None:
    one = order(share=0.1)
    stream = SampleStream(one, global_size=64)
    ledger, cursor, trained = Ledger([(100, 300)]), 0, []
    for _ in range(100):
        plan = stream.plan(cursor, ledger)
        trained += plan.indices.tolist()
        cursor = plan.stop
    assert len(trained) == 6400
    kept = stream.held_out_indices(20)
    found = Counter(one.names[source] for source in one.sources(kept).tolist())
    assert found["web"] == found["books"] == 20 and 1 <= found["code"] <= 20
    assert not set(kept.tolist()) & set(trained)
    # By the source's own numbers: another source beside it changes nothing.
    alone = MixtureOrder({"web": 5000}, seed=3, held_out_share=0.1, weights={"web": 1})
    web = kept[one.sources(kept) == 2] - (700 + 90)
    assert alone.is_held_out(web).all()
    # And not the same numbers of each: neighbouring files may hold the same documents in order.
    twins = order({"a": 1, "b": 1}, lengths={"a": 4000, "b": 4000}, share=0.1)
    first, second = np.split(twins.is_held_out(np.arange(8000)), 2)
    assert first.sum() > 300 and second.sum() > 300
    assert (first & second).sum() < 100, "as many as chance has"


def test_a_source_of_which_all_is_held_out_is_told() -> None:
    with pytest.raises(DataError, match=r"data\.held_out=0\.999.*'code'"):
        order(lengths={"code": 2, "web": 100_000}, share=0.999, weights={"code": 1, "web": 1})


# The run's past


def journal(tmp_path: Path) -> Journal:
    path = tmp_path / "journal.jsonl"
    path.touch()
    lines, length = read_journal(path)
    told_to_skip = [(688, 720), (10**9, 10**9 + 5)]
    return Journal(lines, told_to_skip=told_to_skip, file=LineFile(path, length=length))


def train_state(cursor: int) -> TrainState:
    state = TrainState(RunConfig().guard)
    state.cursor, state.updates = cursor, cursor // 32
    return state


def start(
    tmp_path: Path, weights: Mapping[str, float], *, cursor: int, reached: int = 0, **changes: Any
) -> tuple[MixtureOrder, Incident | None]:
    """As a command does it that takes the run up at ``cursor``."""
    one = order(weights, **changes)
    kept, state = journal(tmp_path), train_state(cursor)
    incident = settle_mixture(SampleStream(one, global_size=32), kept, state, reached=reached)
    if incident is not None:
        kept.add(incident)
    kept.file.close()  # type: ignore[union-attr]
    return one, incident


def test_a_change_of_weights_is_journalled_once_and_holds_from_the_cursor_on(
    tmp_path: Path,
) -> None:
    first, told = start(tmp_path, WEIGHTS, cursor=0)
    assert told is not None and told.detail["start"] == 0
    assert start(tmp_path, WEIGHTS, cursor=640)[1] is None, "nothing changed"
    other = WEIGHTS | {"code": 0.0, "web": 1.0}
    second, told = start(tmp_path, other, cursor=3200)
    assert told is not None and told.kind == "mixture" and told.detail["start"] == 3200
    assert "web 0.500" in told.decision and "before, books 0.200" in told.reason
    assert read(second, 0, 3200) == read(first, 0, 3200)
    require_whole_epochs(read(second, 0, 10_000), LENGTHS)
    # The newest checkpoint is damaged: the run is taken up behind the change, which stands.
    third, told = start(tmp_path, other, cursor=1600)
    assert told is None and read(third, 0, 10_000) == read(second, 0, 10_000)
    added = LENGTHS | {"talk": 50}
    fourth, told = start(tmp_path, other | {"talk": 2.0}, cursor=6400, lengths=added)
    assert told is not None and told.detail["start"] == 6400
    assert read(fourth, 0, 6400) == read(second, 0, 6400)
    require_whole_epochs(read(fourth, 0, 12_000), added)
    lines, _ = read_journal(tmp_path / "journal.jsonl")
    refuse_gone_sources(lines, [*added])
    refuse_gone_sources(lines, None)
    with pytest.raises(ConfigError, match="'web' is missing"):
        refuse_gone_sources(lines, ["books", "code", "talk"])


def test_a_plan_from_before_a_change_of_weights_is_made_anew(tmp_path: Path) -> None:
    """The checks at the start plan before the weights are settled."""
    start(tmp_path, WEIGHTS, cursor=0)
    one, kept = order(WEIGHTS | {"code": 9.0}), journal(tmp_path)
    stream, state = SampleStream(one, global_size=32), train_state(cursor=3200)
    early = stream.plan(3200, Ledger())
    incident = settle_mixture(stream, kept, state, reached=0)
    assert incident is not None and incident.detail["start"] == 3200
    plan = stream.plan(3200, Ledger())
    assert plan.indices.tolist() == one.indices(plan.positions).tolist()
    assert plan.indices.tolist() != early.indices.tolist()


def test_what_the_ledger_names_keeps_its_samples(tmp_path: Path) -> None:
    """A discard behind the checkpoint: its positions must not lead to other samples now."""
    start(tmp_path, WEIGHTS, cursor=0)
    kept = journal(tmp_path)
    detail = {"verdict": "non_finite", "loss": "nan", "grad_norm": "nan", "tokens": 1,
              "nonfinite_ranks": 1, "withheld": None}  # fmt: skip
    kept.add(
        Incident(kind="discard", step=9, decision="discard", reason="nan", samples=(704, 736),
                 detail=detail)
    )  # fmt: skip
    _, told = start(tmp_path, {"web": 1.0}, cursor=640)
    assert told is not None and told.detail["start"] == 736, "not the far range that was told"


def test_a_run_that_was_told_to_skip_what_it_passed_changes_where_one_that_met_it_does(
    tmp_path: Path,
) -> None:
    start(tmp_path, WEIGHTS, cursor=0)
    other = {"books": 1.0, "code": 1.0, "web": 1.0}
    assert started_at(start(tmp_path, other, cursor=640, reached=680)) == 640, "not met yet"
    assert started_at(start(tmp_path, WEIGHTS, cursor=640, reached=800)) == 720


def started_at(begun: tuple[MixtureOrder, Incident | None]) -> int:
    assert begun[1] is not None
    return int(begun[1].detail["start"])


@pytest.mark.parametrize(
    "detail",
    [{}, {"start": -1, "weights": {"a": 1}}, {"start": 0, "weights": [1]},
     {"start": 0, "weights": {"a": "x"}}, {"start": 0, "weights": {"a": 0.0}},
     {"start": 0, "weights": {}}],
)  # fmt: skip
def test_a_damaged_line_is_refused(tmp_path: Path, detail: dict[str, Any]) -> None:
    line = Incident(kind="mixture", step=0, decision="", reason="", detail=detail).to_json()
    (tmp_path / "journal.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match="line 1"):
        read_journal(tmp_path / "journal.jsonl")


# Settings


def mixture(sources: str, *more: str) -> RunConfig:
    return compose(["data=synthetic", f"data.sources={sources}", *more])


def test_sources_of_several_kinds_become_one_data_set(tmp_path: Path) -> None:
    np.save(tmp_path / "ready.npy", np.arange(500, dtype=np.uint16) % 60)
    config = mixture(
        f"[{{path: {tmp_path}/ready.npy, kind: tokens, weight: 3}},"
        "{name: made, samples: 200, seed: 5}]",
        "data.seq_len=8",
        "data.vocab_size=64",
    )
    check(config, world_size=1)
    dataset = open_dataset(config)
    assert [source.name for source in sources_of(config.data)] == ["ready", "made"]
    assert len(dataset) == 200 + 499 // 8 and dataset.vocab_size == 64
    assert dataset.describe(0) == "made: synthetic sample 0"
    assert dataset.describe(201) == "ready: ready.npy tokens 8-17"
    stream = sample_stream(config, dataset)
    indices = stream.plan(0, Ledger()).indices
    assert 0.5 < (indices >= 200).mean() < 1.0
    heavier = mixture(
        "[{name: made, samples: 200, seed: 5, weight: 9},"
        f"{{path: {tmp_path}/ready.npy, kind: tokens}}]",
        "data.seq_len=8",
        "data.vocab_size=64",
    )
    assert open_dataset(heavier).fingerprint() == dataset.fingerprint(), "weights are apart"


def test_a_stored_mixture_is_compared_whole(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    config = mixture("[{name: a, weight: 0.25}, {name: b}]")
    run_dir.store_config(config)
    assert run_dir.settings_changed(config) == {}
    other = mixture("[{name: a, weight: 0.5}, {name: b}]", "resume.allow=[data.sources]")
    changed = run_dir.settings_changed(other)
    assert set(changed) == {"data.sources"}
    run_dir.refuse_change(changed, other)


BASE = compose(["data=synthetic"])


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ("a.bin", ["must be a list"]),
        ([], ["must be a list"]),
        (["a.bin"], ["data.sources[0]=a.bin", "mapping"]),
        ([{"pth": "a"}], ["unknown key 'pth'", "did you mean path"]),
        ([{"path": "a"}, {"path": "b/a.bin"}], ["two are called 'a'"]),
        ([{"path": []}], ["data.sources[0].name", "give it a name"]),
        ([{"name": "a b"}], ["name='a b'", "letters"]),
        ([{"name": "a", "weight": -1}], ["weight=-1", "0 to 1e9"]),
        ([{"name": "a", "weight": float("nan")}], ["weight=nan"]),
        ([{"name": "a", "weight": 0}], ["all weights are 0"]),
        ([{"name": "a", "kind": "txt"}], ["kind=txt", "text, tokens"]),
        ([{"name": "a", "samples": "x"}], ["samples=x"]),
        ([{"name": "a", "seed": -1}], ["seed=-1"]),
        ([{"name": "a", "path": [3]}], ["data.sources[0].path=[3]"]),
    ],
)
def test_impossible_sources_are_told(sources: Any, words: list[str]) -> None:
    BASE.data.sources = sources
    with pytest.raises(ConfigError) as caught:
        check(BASE, world_size=1)
    for word in words:
        assert word in str(caught.value), str(caught.value)

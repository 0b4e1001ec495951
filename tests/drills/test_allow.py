"""A second command with other settings: what is refused, what it says to type, what that does."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.run import Result, finish, train

FP32 = "compute.precision=fp32"


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A finished run of six steps; its schedule's length is theirs."""
    return finish(tmp_path_factory.mktemp("allow") / "run", FP32, "steps=6", ranks=0)


def copied(run: Result, place: Path) -> Path:
    return Path(shutil.copytree(run.out, place))


def changes(run: Result) -> list[tuple[str, object, object]]:
    details = [line["detail"] for line in run.journal("setting_changed")]
    return [(detail["key"], detail["was"], detail["now"]) for detail in details]


def test_a_longer_run_is_refused_with_two_commands_that_work(short: Result, tmp_path: Path) -> None:
    refused = train(copied(short, tmp_path / "a"), FP32, "steps=12", ranks=0)
    assert refused.code == 2 and "schedule.total: was 6, now 12" in refused.text, refused.tail
    sooner = train(tmp_path / "a", FP32, "steps=4", ranks=0)
    assert "steps=4 schedule.total=6 ends sooner, on the schedule as it was" in sooner.text
    passes = train(tmp_path / "a", FP32, "epochs=0.01", ranks=0)
    assert "epochs=0.01 schedule.total=6 trains on" in passes.text, passes.tail
    [anew] = re.findall(r"'(resume\.allow=\S+)'", refused.text)
    [on] = re.findall(r"steps=12 (schedule\.total=\d+) trains on", refused.text)
    # The old schedule, longer: the same run as if it had been told so from the start.
    longer = finish(tmp_path / "a", FP32, "steps=12", on, ranks=0)
    at_once = finish(tmp_path / "b", FP32, "steps=12", on, ranks=0)
    assert longer.summary["steps"] == 12 and longer.digest == at_once.digest
    assert changes(longer) == []
    # The schedule laid out anew: another run from here on, and the journal says so once.
    again = finish(copied(short, tmp_path / "c"), FP32, "steps=12", anew, ranks=0)
    assert again.summary["steps"] == 12 and again.digest != longer.digest
    assert changes(again) == [("schedule.total", 6, 12)]
    assert longer.counted()[8]["lr"] < 0.5 * again.counted()[8]["lr"]


@pytest.mark.full
def test_a_change_that_was_made_is_not_made_again(short: Result, tmp_path: Path) -> None:
    told = (FP32, "steps=12", "resume.allow=[steps]")
    out = copied(short, tmp_path / "a")
    assert changes(finish(out, *told, ranks=0)) == [("schedule.total", 6, 12)]
    again = finish(out, *told, ranks=0)
    assert "all 12 steps are applied already" in again.text
    assert changes(again) == [("schedule.total", 6, 12)]


def test_only_what_is_allowed_may_change(short: Result, tmp_path: Path) -> None:
    told = (FP32, "steps=8", "schedule.total=6", "optim.lr=1e-3", "guard.persist=4")
    refused = train(copied(short, tmp_path / "a"), *told, "resume.allow=[optim]", ranks=0)
    assert refused.code == 2, refused.tail
    assert "guard.persist: was 3, now 4" in refused.text and "optim.lr:" not in refused.text
    assert not changes(refused)
    [allow] = re.findall(r"'(resume\.allow=\S+)'", refused.text)
    assert allow == "resume.allow=[optim,guard.persist]"
    run = finish(tmp_path / "a", *told, allow, ranks=0)
    assert changes(run) == [("optim.lr", 0.003, 0.001), ("guard.persist", 3, 4)]
    assert run.summary["steps"] == 8
    assert "optim.lr: was 0.003, now 0.001" in run.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ("model.dim=64",),
            ["model.dim: was 32, now 64", "param/blocks.0.attention.key.weight: [32, 32]"],
        ),
        (("compute.frozen=[embedding]",), ["exp_avg/embedding.weight: [64, 32] there, none here"]),
    ],
)
def test_weights_of_other_shapes_are_refused_and_nothing_is_touched(
    settings: tuple[str, ...], words: list[str], short: Result, tmp_path: Path
) -> None:
    out = copied(short, tmp_path / "a")
    before = {name: (out / name).read_bytes() for name in ("config.yaml", "journal.jsonl")}
    told = (FP32, "steps=6", *settings)
    refused = train(out, *told, "resume.allow_change=true", ranks=0)
    assert refused.code == 2 and "Traceback" not in refused.text, refused.tail
    assert all(word in refused.text for word in words), refused.text
    assert before == {name: (out / name).read_bytes() for name in before}
    # Without leave the same is told, and leave is not what is recommended.
    refused = train(out, *told, ranks=0)
    assert refused.code == 2, refused.tail
    assert "cannot change" in refused.text and "resume.allow=" not in refused.text, refused.text


def test_another_corpus_may_be_allowed_by_its_key(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("to be or not to be, that is the question\n" * 400)
    text = (FP32, "data.kind=text", f"data.path={corpus}", f"data.cache={tmp_path / 'cache'}")
    finish(tmp_path / "run", "steps=6", "schedule.total=12", *text, ranks=0)
    with (corpus / "a.txt").open("a") as file:
        file.write("whether it is nobler in the mind\n" * 20)
    told = ("steps=12", "schedule.total=12", *text)
    refused = train(tmp_path / "run", *told, "resume.allow=[optim.lr]", ranks=0)
    assert refused.code == 2 and "corpus is not the one" in refused.text, refused.tail
    assert "'resume.allow=[optim.lr,data.path]'" in refused.text, "what was allowed stays"
    in_epochs = train(tmp_path / "run", "epochs=9", *text, ranks=0)  # other ones, of other data
    assert "corpus is not the one" in in_epochs.text, in_epochs.tail
    run = finish(tmp_path / "run", *told, "resume.allow=[data.path]", ranks=0)
    [(key, was, now)] = changes(run)
    assert key == "data" and was != now and len(str(was)) == len(str(now)) == 64


def test_a_start_that_failed_before_its_first_step_binds_nobody(tmp_path: Path) -> None:
    own = (FP32, "steps=4", "data._target_=tests.uncommon_guests.Uneven")
    losses = "model._target_=tests.uncommon_guests.Counting"
    failed = train(tmp_path / "run", *own, losses, "model.how=mean", ranks=0)
    assert failed.code == 2 and "it gives one number, one number" in failed.text, failed.tail
    run = finish(tmp_path / "run", *own, losses, "optim.lr=1e-3", ranks=0)
    assert run.digest == finish(tmp_path / "anew", *own, losses, "optim.lr=1e-3", ranks=0).digest
    assert changes(run) == []

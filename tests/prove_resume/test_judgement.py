"""From two records to what differs first: a table, without a process."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from runner.prove.compare import KINDS
from runner.prove.drive import choose_kills
from runner.prove.inside.hooks import written
from runner.prove.judgement import Judgement, compare_ranks, compare_start
from runner.prove.record import Save, StartRecord, Step, Trajectory, checkpoints
from runner.prove.verdict import Repeats, Verdict
from runner.system.parsing import json_text
from tests.prove_resume import table as tables

STEPS, EPOCH, SAVED, RANKS = 24, 8, 10, 2
SAVES = [
    Save(after=5, num_bytes=100, names=("5",)),
    Save(after=SAVED, num_bytes=100, names=("10",)),
]
START = SAVED + 1
Ranks = dict[int, Step]


def entry(*of: object, norm: float = 1.0) -> list[Any]:
    """The digest of a tensor that only depends on what it is said to depend on."""
    return [repr(of), norm]


def step_of(number: int, rank: int) -> Step:
    epoch, place = divmod(number - 1, EPOCH)
    samples = [f"sample {rank} {n}" for n in range(3 * EPOCH)]
    random.Random(f"{epoch} {rank}").shuffle(samples)
    rows = tuple(samples[3 * place : 3 * place + 3])
    names, rate = ("left", "right", "head"), 0.1 / number
    return Step(
        weights={n: entry("w", n, number, norm=number + 1.0) for n in names},
        state={
            f"{n}/{key}": of
            for n in names
            for key, of in {
                "step": entry("step", number, norm=number - 1.0),
                "exp_avg": entry("m", n, number, norm=2.0),
                "exp_avg_sq": entry("v", n, number, norm=3.0),
            }.items()
        },
        options={
            n: {"lr": rate * (2 if n == "left" else 1), "eps": 1e-8, "betas": [1 - rate, 0.99]}
            for n in names
        },
        gradients={n: entry("g", n, number, rank) for n in names},
        buffers={"mean": entry("mean", number, rank)},
        copies={"Net": {n: entry("ema", n, number) for n in names}},
        scalers=[{"scale": 1024.0, "growth_tracker": number}],
        random={"torch": f"torch {number} {rank}", "python": "unused"},
        batches=[rows],
        losses=[1.0 / number],
    )


def trajectory(first: int = 1, last: int = STEPS) -> Trajectory:
    steps = {
        number - first + 1: {rank: step_of(number, rank) for rank in range(RANKS)}
        for number in range(first, last + 1)
    }
    return Trajectory(steps=steps, world_size=RANKS, saves=[], num_bytes=100)


def resumed(change: Callable[[Ranks, int], None] = lambda ranks, number: None,
            first: int = START) -> Trajectory:  # fmt: skip
    """A resumed run; ``change`` gets the ranks of each of its steps, and the step's own number."""
    found = trajectory(first)
    for number, ranks in found.steps.items():
        change(ranks, number + first - 1)
    return found


def each(change: Callable[[Step, int], None]) -> Callable[[Ranks, int], None]:
    """``change`` on every rank."""

    def change_all(ranks: Ranks, number: int) -> None:
        for step in ranks.values():
            change(step, number)

    return change_all


def spoiled(step: Step, number: int, since: int = START) -> None:
    """What follows from a wrong state: another gradient, and other weights after it."""
    step.gradients = {name: entry("other", number) for name in step.gradients}
    step.losses = [step.losses[0] + 0.25]
    if number > since:
        step.weights = {name: entry("other w", number) for name in step.weights}


def read(of: Callable[[int], int], since: int = START) -> Callable[[Ranks, int], None]:
    """Reads the batch of another step, and goes wrong after it."""

    def change(ranks: Ranks, number: int) -> None:
        source = of(number)
        if source != number:
            for rank, step in ranks.items():
                step.batches = step_of(source, rank).batches
                spoiled(step, number, since)

    return change


def zero_moments(step: Step, number: int) -> None:
    for name in step.weights:
        step.state[f"{name}/exp_avg"] = entry("zero", norm=0.0)
    spoiled(step, number)


def saved_twice(step: Step, number: int) -> None:
    for name in step.weights:
        step.state[f"{name}/exp_avg"] = step.state[f"{name}/exp_avg_sq"]
    spoiled(step, number)


def no_state(step: Step, number: int) -> None:
    if number == START:
        step.state = {}
    spoiled(step, number)


def counts_anew(step: Step, number: int) -> None:
    for name in step.weights:
        step.state[f"{name}/step"] = entry("step", 0, norm=float(number - START))
    spoiled(step, number)


def swapped_state(step: Step, number: int) -> None:
    for key in ("step", "exp_avg", "exp_avg_sq"):
        left, right = f"left/{key}", f"right/{key}"
        step.state[left], step.state[right] = step.state[right], step.state[left]
    spoiled(step, number)


def swapped_options(step: Step, number: int) -> None:
    step.options["left"], step.options["right"] = step.options["right"], step.options["left"]
    spoiled(step, number)


def cycle_anew(step: Step, number: int) -> None:
    """As OneCycleLR's, which moves the momentum as well."""
    step.options = step_of(number - START + 1, 0).options
    spoiled(step, number)


def schedule_anew(step: Step, number: int) -> None:
    betas = {name: one["betas"] for name, one in step.options.items()}
    cycle_anew(step, number)
    step.options = {n: {**one, "betas": betas[n]} for n, one in step.options.items()}


def other_option(step: Step, number: int) -> None:
    step.options = {name: {**one, "eps": 1e-6} for name, one in step.options.items()}
    spoiled(step, number)


def rounded(step: Step, number: int) -> None:
    if number == START:
        step.weights = {
            n: [*entry("bf16", n, norm=e[1]), "bfloat16"] for n, e in step.weights.items()
        }
    spoiled(step, number)


def older_weights(step: Step, number: int) -> None:
    if number == START:
        step.weights = step_of(6, 0).weights
    spoiled(step, number)


def other_weights(step: Step, number: int) -> None:
    if number == START:
        step.weights["head"] = entry("who knows")
    spoiled(step, number)


def lost_buffers(step: Step, number: int) -> None:
    step.buffers = {"mean": entry("fresh", number, norm=0.0)}
    spoiled(step, number)


def lost_copy(step: Step, number: int) -> None:
    step.copies = {"Net": {n: entry("fresh", n, number) for n in step.weights}}


def lost_scaler(step: Step, number: int) -> None:
    step.scalers = [{"scale": 65536.0, "growth_tracker": number - START}]
    step.losses = [step.losses[0] * 64]


def lost_random(step: Step, number: int) -> None:
    step.random = {**step.random, "torch": f"fresh {number}"}
    spoiled(step, number)


def drawn_data(step: Step, number: int) -> None:
    lost_random(step, number)
    step.batches = [(f"drawn {number} a", f"drawn {number} b")]


def buffered(ranks: Ranks, number: int) -> None:
    """Samples of the next steps, mixed."""
    for rank, step in ranks.items():
        other = step_of(number % STEPS + 1, rank).batches[0]
        step.batches = [(step.batches[0][0], other[1], step.batches[0][2])]
        spoiled(step, number)


def hidden_counter(step: Step, number: int) -> None:
    spoiled(step, number)


def other_sum(step: Step, number: int) -> None:
    step.gradients = {n: entry("sum", n, norm=1.0 + 1e-7) for n in step.gradients}
    if number > START:
        step.weights = {n: entry("sum w", n, norm=e[1]) for n, e in step.weights.items()}


def ranks_change_places(ranks: Ranks, number: int) -> None:
    ranks[0].batches, ranks[1].batches = ranks[1].batches, ranks[0].batches
    each(spoiled)(ranks, number)


def skip(batches: int) -> Callable[[int], int]:
    return lambda number: min(STEPS, number + batches)


def third_epoch(number: int) -> int:
    return number - EPOCH if number > 2 * EPOCH else number


CASES: dict[str, tuple[Callable[[Ranks, int], None], str, int, str]] = {
    "zero moments": (each(zero_moments), "optimizer_state", START, "exp_avg of all 3"),
    "one saved twice": (each(saved_twice), "optimizer_state", START, "is exp_avg_sq (step 11)"),
    "no optimizer": (each(no_state), "optimizer_state", START, "the model, not the optimizer"),
    "step counts": (each(counts_anew), "optimizer_steps", START, "step of all 3 parameters is 0"),
    "states swapped": (each(swapped_state), "param_groups", START, "those of other parameters"),
    "options swapped": (each(swapped_options), "param_groups", START, "2 of 3 parameters"),
    "schedule": (each(schedule_anew), "learning_rate", START, "0.2, was 0.0181818"),
    "schedule of momentum": (each(cycle_anew), "learning_rate", START, "0.2, was 0.0181818"),
    "option": (each(other_option), "options", START, "eps 1e-06, was 1e-08"),
    "bf16": (each(rounded), "weights_rounded", START, "rounded to bfloat16"),
    "older weights": (each(older_weights), "older_checkpoint", START, "those after step 5"),
    "one weight": (each(other_weights), "weights", START, "1 of 3 tensors (head)"),
    "buffers": (each(lost_buffers), "buffers", START, "(mean) is zero after the resume (step 11)"),
    "ema": (each(lost_copy), "ema", START, "averaged weights (EMA) are not saved"),
    "scaler": (each(lost_scaler), "scaler", START, "scale 65536, was 1024"),
    "random": (each(lost_random), "random", START, "(torch) differs from step 11"),
    "drawn data": (each(drawn_data), "random", START, "its data is drawn from that state"),
    "anew": (read(lambda n: n - START + 1), "data_restarted", START, "step 11 reads"),
    "one skipped": (read(skip(1)), "data_skipped", START, "the batch of step 12: one"),
    "one repeated": (read(lambda n: n - 1), "data_repeated", START, "the batch of step 10"),
    "three skipped": (read(skip(3)), "data_skipped", START, "3 batches are skipped"),
    "epoch": (read(lambda n: n - EPOCH), "data_epoch", START, "the batch of step 3: the order"),
    "later epoch": (read(third_epoch, 17), "data_epoch", 17, "step 17 reads the batch of step 9"),
    "buffer": (buffered, "data_order", START, "known samples in another order"),
    "ranks": (ranks_change_places, "data_rank", START, "on rank 0 the batch of rank 1"),
    "hidden": (each(hidden_counter), "gradients", START, "something that is not saved"),
    "sums": (each(other_sum), "rounding", START, "No state is lost"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_differs_first(name: str) -> None:
    change, kind, step, words = CASES[name]
    judgement = compare_start(trajectory(), resumed(change), SAVES)
    first = judgement.findings[0]
    assert (judgement.start, first.kind, first.step) == (START, kind, step)
    assert words in first.sentence
    assert judgement.is_equal is (kind == "rounding")
    assert kind in KINDS


def test_the_page_says_what_the_record_says() -> None:
    """``python -m tests.prove_resume.table --page`` writes it anew."""
    pages = "\n".join(page.read_text() for page in tables.PAGES)
    rows = tables.read(tables.RECORD)
    for numbers in (tables.summary(rows), tables.commits(rows), tables.table(rows)):
        assert pages.count(numbers) == 1
    assert tables.page_of(pages, rows[:50]) != pages == tables.page_of(pages, rows)
    page = tables.PAGE.read_text()
    assert all(f"`{kind}`" in page for kind in KINDS)


def test_every_kind_has_a_name_and_what_was_lost_a_remedy() -> None:
    for kind in KINDS:
        finding = compare_start(trajectory(), resumed(each(zero_moments)), SAVES).findings[0]
        judgement = Judgement(start=1, last=2, findings=(replace(finding, kind=kind),))
        text = Verdict(steps=24, kills=(14,), resumes=(judgement,)).text()
        mends = kind not in ("rounding", "gradients", "frozen", "options")
        assert ("To mend it" in text) is mends, kind


def test_what_follows_is_told_as_well() -> None:
    since = dict(compare_start(trajectory(), resumed(each(lost_random)), SAVES).since)
    assert since == {"random": START, "losses": START, "gradients": START, "weights": START + 1}


def test_an_equal_run() -> None:
    judgement = compare_start(trajectory(), resumed(), SAVES)
    assert (judgement.findings, judgement.start, judgement.last) == ((), START, STEPS)
    verdict = Verdict(steps=STEPS, ranks=RANKS, kills=(14,), resumes=(judgement,))
    assert verdict.text().startswith("Equal bit for bit: 24 steps, 1 kill, 2 ranks")
    assert verdict.code == 0 and verdict.first is None


def test_a_seed_that_is_set_again_at_each_start() -> None:
    """Batches are drawn from a generator that stands where it stood at the first step."""

    def change(ranks: Ranks, number: int) -> None:
        for rank, step in ranks.items():
            source = step_of(number - START + 1, rank)
            step.random, step.batches = source.random, source.batches
            spoiled(step, number)

    first = compare_start(trajectory(), resumed(change), SAVES).findings[0]
    assert (first.kind, first.step) == ("random", START)
    assert "reads the batch of step 1" in first.sentence and "drawn from" in first.sentence


@pytest.mark.parametrize(("between", "kind"), [([], "data_order"), (["torch"], "random")])
def test_an_order_is_drawn_only_from_what_moves(between: list[str], kind: str) -> None:
    """A shuffle buffer is lost, and the random state that dropout draws from is lost too."""
    reference = trajectory()
    for step in reference.steps[EPOCH + 1].values():
        step.between = between

    def change(ranks: Ranks, number: int) -> None:
        buffered(ranks, number)
        each(lost_random)(ranks, number)

    assert compare_start(reference, resumed(change), SAVES).findings[0].kind == kind


def test_ranks_that_shuffle_each_for_itself() -> None:
    """They read the same samples within an epoch, which does not end where one comes again."""
    reference, other = trajectory(), resumed(each(spoiled))
    for epoch in range(STEPS // EPOCH):
        for rank in range(RANKS):
            order = [f"sample {n}" for n in range(6 * EPOCH)]
            random.Random(f"{epoch} {rank}").shuffle(order)
            for place in range(EPOCH):
                step = reference.steps[epoch * EPOCH + place + 1][rank]
                step.batches = [tuple(order[3 * place : 3 * place + 3])]
    for number, ranks in other.steps.items():
        for rank, step in ranks.items():
            step.batches = reference.steps[EPOCH + number][rank].batches
    first = compare_start(reference, other, SAVES).findings[0]
    assert (first.kind, first.step) == ("data_restarted", START)


def test_a_random_state_that_nothing_reads_is_a_note() -> None:
    def change(step: Step, number: int) -> None:
        step.random = {**step.random, "python": f"other {number}"}

    judgement = compare_start(trajectory(), resumed(each(change)), SAVES)
    assert judgement.is_equal and "(python) differs from step 11" in judgement.notes[0]


def test_a_run_that_starts_anew() -> None:
    judgement = compare_start(trajectory(), trajectory(), SAVES)
    assert judgement.start == 1
    assert judgement.findings[0].kind == "not_resumed"
    assert "though step 10 was saved" in judgement.findings[0].sentence


def test_a_whole_older_checkpoint() -> None:
    judgement = compare_start(trajectory(), resumed(first=6), SAVES)
    assert judgement.start == 6
    assert [finding.kind for finding in judgement.findings] == ["older_checkpoint"]
    assert "goes on after step 5" in judgement.findings[0].sentence


def test_another_ranks_state_is_told() -> None:
    reference = trajectory()
    for ranks in reference.steps.values():
        for rank, step in ranks.items():
            step.state = {f"{n}/exp_avg": entry("m", n, rank, norm=2.0) for n in "abc"}
    other = replace(
        reference, steps={n - SAVED: r for n, r in reference.steps.items() if n > SAVED}
    )
    other = copy.deepcopy(other)
    other.steps[1][1].state = other.steps[1][0].state
    first = compare_start(reference, other, SAVES).findings[0]
    assert (first.kind, first.rank) == ("rank", 1)
    assert first.sentence.startswith("Rank 1: Optimizer: ")
    assert "those of rank 0 (step 11)" in first.sentence


def test_a_snapshot_of_the_weights_is_no_average() -> None:
    """A copy that stays as it is, such as the best weights so far, may be missing."""
    reference = trajectory()
    for ranks in reference.steps.values():
        for step in ranks.values():
            step.copies["best"] = {n: entry("best", n) for n in step.weights}
    assert compare_start(reference, resumed(), SAVES).is_equal


def test_micro_batches_are_told_apart() -> None:
    """One of two micro-batches skipped: no step reads another step's batches as a whole."""
    reference = trajectory()
    for number, ranks in reference.steps.items():
        for rank, step in ranks.items():
            step.batches = [(f"{rank} {2 * number}",), (f"{rank} {2 * number + 1}",)]
    other = replace(
        reference, steps={n - SAVED: r for n, r in reference.steps.items() if n > SAVED}
    )
    other = copy.deepcopy(other)
    for number, ranks in other.steps.items():
        for rank, step in ranks.items():
            first = 2 * (number + SAVED) + 1
            step.batches = [(f"{rank} {first}",), (f"{rank} {first + 1}",)]
            spoiled(step, number + SAVED)
    found = compare_start(reference, other, SAVES).findings[0]
    assert found.kind == "data_skipped" and "one batch is skipped" in found.sentence


def midway(*, keeps_gradients: bool) -> Judgement:
    """The checkpoint was written between the two micro-batches of a step."""
    reference, other = trajectory(), resumed()
    for found, first in ((reference, 1), (other, START)):
        for number, ranks in found.steps.items():
            for rank, step in ranks.items():
                place = 2 * (number + first - 1)
                step.batches = [(f"{rank} {place}",), (f"{rank} {place + 1}",)]
                step.losses = [1.0, 0.5]
    for step in other.steps[1].values():
        step.batches, step.losses = step.batches[1:], step.losses[1:]
        step.buffers = {"mean": entry("after the first batch")}
        if not keeps_gradients:
            step.gradients = {name: entry("half") for name in step.gradients}
    return compare_start(reference, other, SAVES)


def test_gradients_that_were_accumulated_are_state() -> None:
    assert midway(keeps_gradients=True).is_equal
    first = midway(keeps_gradients=False).findings[0]
    assert first.kind == "gradients" and "between its batches" in first.sentence


def test_buffers_that_ddp_broadcasts_before_they_are_used() -> None:
    """The checkpoint has those of rank 0; the gradient of rank 1 is that of the undisturbed run."""
    other = resumed()
    other.steps[1][1].buffers = step_of(START, 0).buffers
    assert compare_start(trajectory(), other, SAVES).is_equal
    other.steps[1][1].gradients = {name: entry("other") for name in other.steps[1][1].gradients}
    assert compare_start(trajectory(), other, SAVES).findings[0].kind == "rank"
    other = resumed(each(lost_random))
    other.steps[1][1].buffers = step_of(START, 0).buffers
    assert compare_start(trajectory(), other, SAVES).findings[0].kind == "random"


def test_frozen_weights_are_compared_with_those_of_the_start() -> None:
    reference, other = trajectory(), resumed()
    for rank in range(RANKS):
        reference.steps[1][rank].frozen = {"base": entry("base")}
        other.steps[1][rank].frozen = {"base": entry("drawn anew")}
    for number, ranks in other.steps.items():
        each(spoiled)(ranks, number + SAVED)
    first = compare_start(reference, other, SAVES).findings[0]
    assert first.kind == "frozen" and "(base) is" in first.sentence


def test_weights_that_are_trained_later_are_not_lost_frozen_ones() -> None:
    """Layers are thawed after the first step; or one optimizer's are frozen while another steps."""
    reference, other = trajectory(), resumed()
    for rank in range(RANKS):
        reference.steps[1][rank].frozen = {"base": entry("base"), "top": entry("top")}
        other.steps[1][rank].frozen = {"base": entry("base")}
    assert compare_start(reference, other, SAVES).is_equal


def test_modules_that_are_found_when_they_are_called() -> None:
    other = resumed()
    for step in other.steps[1].values():
        step.buffers = {}
    assert compare_start(trajectory(), other, SAVES).is_equal


def test_the_best_weights_are_nothing_to_resume_from() -> None:
    """They are written more often than checkpoints, and are as large as the weights."""
    saves = [
        Save(after=5, num_bytes=300, names=("last-5.pt", "best.pt")),
        Save(after=SAVED, num_bytes=300, names=("last-10.pt", "best.pt")),
        Save(after=12, num_bytes=100, names=("best.pt",)),
    ]
    assert compare_start(trajectory(), resumed(), saves).is_equal
    # A log of some bytes, which are many beside a tiny model's, is written after the checkpoint.
    found = trajectory()
    sizes = {5: 300, SAVED: 300, SAVED + 1: 60, 13: 70}
    found.saves = [
        Save(after=n, num_bytes=b, names=(f"{n}.pt" if b == 300 else "log",))
        for n, b in sizes.items()
    ]
    merged = checkpoints(found)
    assert [save.after for save in merged] == [5, SAVED + 1, 13]
    assert compare_start(trajectory(), resumed(), merged).is_equal
    older = compare_start(trajectory(), resumed(first=6), saves).findings
    assert [one.kind for one in older] == ["older_checkpoint"]
    assert "though step 10 was saved" in older[0].sentence


def test_a_module_that_is_called_in_vain_before_the_first_step() -> None:
    other = resumed()
    for step in other.steps[1].values():
        right = {"batch": [*step.batches[0]], "random": step.random, "buffers": step.buffers}
        step.later = [right]
        step.batches, step.random, step.buffers = [("zeros",)], {"torch": "?"}, {"mean": entry("?")}
    judgement = compare_start(trajectory(), other, SAVES)
    assert judgement.is_equal and not judgement.notes


def test_a_random_state_that_comes_right_explains_nothing_later() -> None:
    other = resumed()
    for number, ranks in other.steps.items():
        for step in ranks.values():
            if number == 1:
                step.random = {**step.random, "torch": "not yet"}
            if number > 3:
                spoiled(step, number + SAVED, START + 3)
    first = compare_start(trajectory(), other, SAVES).findings[0]
    assert (first.kind, first.step) == ("gradients", START + 3)


def test_a_schedule_that_starts_anew_before_it_shows_is_a_note() -> None:
    reference, other = trajectory(), resumed()
    for found, first in ((reference, 1), (other, 1)):
        for number, ranks in found.steps.items():
            for step in ranks.values():
                step.schedules = [number - first]
    judgement = compare_start(reference, other, SAVES)
    assert judgement.is_equal and "counts [0] at step 11, was [10]" in judgement.notes[0]


def test_other_ranks_read_the_same_samples_or_not() -> None:
    reference = trajectory()
    single = {}
    for number in range(START, STEPS + 1):
        merged = step_of(number, 0)
        merged.batches = [row for rank in range(RANKS) for row in step_of(number, rank).batches]
        single[number - SAVED] = {0: merged}
    other = Trajectory(steps=single, world_size=1)
    assert compare_ranks(reference, other, SAVES).is_equal
    late = [*SAVES[:1], replace(SAVES[1], after=SAVED + 2)]  # it was written beside the training
    assert compare_ranks(reference, other, late).start == START
    single[2][0].losses = [1.0]
    drawn = compare_ranks(reference, other, SAVES)
    assert drawn.is_equal and "step 12 is 1, was 0.0833333, on equal" in drawn.notes[0]
    still = trajectory()
    for step in (step for ranks in still.steps.values() for step in ranks.values()):
        step.random = {}
    differs = compare_ranks(still, other, SAVES)
    assert [(one.kind, one.step) for one in differs.findings] == [("gradients", SAVED + 2)]
    single[4][0].batches[0] = ("new", *single[4][0].batches[0][1:])
    judgement = compare_ranks(reference, other, SAVES)
    assert judgement.findings[0].step == SAVED + 4
    assert "1 of 6 are missing, 1 are new" in judgement.findings[0].sentence


def test_noise_is_allowed_where_the_script_has_it() -> None:
    def noisy(step: Step, number: int) -> None:
        if number > 14:
            step.gradients = {n: entry("noise", n, norm=1.0 + 1e-3) for n in step.gradients}
            step.losses = [step.losses[0] * (1 + 1e-3)]

    assert compare_start(
        trajectory(), resumed(each(noisy)), SAVES, exact_until=14, tolerance=1e-2
    ).is_equal
    exact = compare_start(trajectory(), resumed(each(noisy)), SAVES)
    assert exact.findings[0].kind == "gradients" and exact.findings[0].step == 15
    kept = compare_start(
        trajectory(), resumed(each(lost_copy)), SAVES, exact_until=14, tolerance=1e-2
    )
    assert kept.findings[0].kind == "ema"


def test_decimals_of_a_noisy_loss() -> None:
    repeats = Repeats(exactly=False, since=3, loss_noise=3e-4)
    assert repeats.decimals == 3
    assert "differs from step 3 on, and 3 decimals" in repeats.sentence()


def test_checkpoints_are_large_and_followed() -> None:
    found = trajectory()
    sizes = {0: 500, 4: 10, 5: 100, 6: 60, 12: 200}
    found.saves = [Save(after=n, num_bytes=size, names=("a",)) for n, size in sizes.items()]
    assert [save.after for save in checkpoints(found)] == [6, 12]


def test_a_file_is_saved_once_it_has_its_name(tmp_path: Path) -> None:
    """What is written under another name for several steps is no checkpoint before."""
    weights, other = (400, 1, 1), (9, 1, 2)
    looks: list[dict[str, Any]] = [
        {}, {}, {"writing-1/w": weights}, {"writing-1/w": weights, "a": other},
        {"step-1/w": weights, "a": other}, {"step-1/w": weights, "writing-2/w": (400, 2, 3)},
    ]  # fmt: skip
    about = {"options": [], "rank": 0, "world_size": 1, "workers": 0, "pid": 1, "num_bytes": 400}
    lines = [
        {"step": n, "written": written(before, now), "gradients": {"w": ["g", 1.0]}, **about}
        for n, (before, now) in enumerate(pairwise(looks), start=1)
    ]
    (tmp_path / "steps-1.jsonl").write_text("".join(json_text(line) + "\n" for line in lines))
    recorded = StartRecord(tmp_path)
    recorded.poll()
    saves = recorded.trajectory().saves
    assert [(save.after, save.names) for save in saves] == [
        (2, ("a",)), (3, ("step-1/w",)), (4, ("writing-2/w",)),
    ]  # fmt: skip
    assert not saves[2].is_like(saves[1])


def test_kills_come_after_a_checkpoint_and_leave_steps() -> None:
    for seed in range(50):
        first, second = choose_kills(SAVES, 60, seed)
        assert 12 <= first <= 27 and 30 <= second <= 45
    assert choose_kills([Save(after=58, num_bytes=1, names=())], 60, 3) == (59,)

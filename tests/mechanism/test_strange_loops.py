"""Loops that strangers write: poisoned, ended twice and resumed, they are the plain loop."""

from __future__ import annotations

import itertools
import os
import signal
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from runner import Guard, Sampler
from runner.embed.data.loaders import Exhausted, _loses_a_buffer, source_of
from runner.embed.loop.rollback_state import CannotReadAgain
from runner.embed.state.codec import pack, unpack
from runner.system.error import CheckpointError, ConfigError
from tests import strange_loops
from tests.frameworks import digest
from tests.rows import full
from tests.script_run import ends_of
from tests.strange_loops import DIM, Given, Net, build, computed

pytestmark = pytest.mark.usefixtures("node_memory")

RULES: dict[str, Any] = {"every": 6, "clean_after": 2, "min_history": 6, "memory_every": 0}
BAD = (4, 15, 25, 26, 27)  # the last three in a row: a rollback
ENDS = (13, 8)  # batches after which the first two starts end
COSTLY = (  # the three last are kinds of random_windows_accumulated
    *("hugging_face_stream", "workers_that_stay"),
    *("random_windows_accumulated_and_not_said", "random_windows_accumulated_without_dropout"),
    *("random_windows", "random_windows_of_numpy_accumulated"),
    "random_windows_accumulated_by_a_generator",
)
LOOPS = [
    full(name) if name in COSTLY else name
    for name, one in vars(strange_loops).items()
    if isinstance(one, types.FunctionType)
    and one.__module__ == strange_loops.__name__
    and name not in ("accumulated", "build", "computed", "end", "over")
]


class Ended(Exception):
    pass


class NoGuard:
    """The loop without a guard, which never saw the batches in ``skipped``."""

    resumed_step = 0

    def __init__(self, skipped: list[tuple[int, int]], **given: Any) -> None:
        self._skipped = {n for start, stop in skipped for n in range(start, stop)}
        self._model, self._clip = given["model"], given.get("clip")
        self._number = -1
        self.updates = 0

    def over(self, loader: Any, *, steps: int | None = None) -> Iterator[Any]:
        for batch in loader:
            if steps is not None and self.updates >= steps:
                return
            self._number += 1
            if self._number not in self._skipped:
                yield batch

    def note(self, loss: Any) -> None:
        pass

    def ok(self, loss: Any) -> bool:
        if self._clip:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self.updates += 1
        return True


def guarded(loop: Callable[[Given], Any], out: Path, **settings: Any) -> tuple[Any, Guard]:
    """What the loop ends with after starts that end without a word."""
    for number in range(len(ENDS) + 8):  # a rollback may end a start as well
        guards: list[Guard] = []
        left = ENDS[number] if number < len(ENDS) else -1

        def make(guards: list[Guard] = guards, **given: Any) -> Guard:
            guards.append(Guard(out, **RULES, **settings, **given))
            return guards[0]

        def tick(guards: list[Guard] = guards, count: list[int] = [left]) -> None:  # noqa: B006
            count[0] -= 1
            if count[0] == 0:
                guards[0]._finalizer()  # as a process that is gone, but for its lease
                raise Ended

        try:
            return loop(Given(make, BAD, tick)), guards[0]
        except Ended:
            pass
        except CannotReadAgain:
            guards[0]._finalizer()
    raise AssertionError("unreachable")


@pytest.mark.parametrize("name", LOOPS)
def test_it_is_the_loop_that_never_saw_what_was_skipped(tmp_path: Path, name: str) -> None:
    loop = getattr(strange_loops, name)
    ended, guard = guarded(loop, tmp_path / "run")
    skipped = guard.skipped
    guard.close()
    assert skipped
    plain = loop(Given(lambda **given: NoGuard(skipped, **given), (), lambda: None))
    differing = [key for key in plain if digest(plain[key]) != digest(ended[key])]
    assert not differing, skipped


def test_a_scaler_whose_steps_are_read_late(tmp_path: Path) -> None:
    """Where both withhold an update, the scale is as if the step had never been."""

    def loop(given: Given) -> Any:
        return strange_loops.scaled_fp16(given, fused=True)

    ended, guard = guarded(loop, tmp_path / "run", sync=False)
    skipped, scale = guard.skipped, ended["others"][2]["scale"]
    guard.close()
    assert len(skipped) >= 3 and 1 <= scale < 2.0**24
    plain = loop(Given(lambda **given: NoGuard(skipped, **given), (), lambda: None))
    assert digest(plain) == digest(ended)


class Reshuffled:
    """Draws an order now and then, in the midst of a pass."""

    def __init__(self, given: Given) -> None:
        self._is_bad = bool(given.bad)

    def __iter__(self) -> Iterator[torch.Tensor]:
        samples = torch.randn(40, DIM, generator=torch.Generator().manual_seed(3))
        loader = DataLoader(samples, batch_size=4, shuffle=True)  # type: ignore[arg-type]
        batches = itertools.chain.from_iterable(itertools.repeat(loader, 4))
        for number, batch in enumerate(batches):
            yield batch * (float("nan") if self._is_bad and number in (9, 29) else 1.0)


def test_a_step_read_late_before_a_read_that_draws(tmp_path: Path) -> None:
    def loop(given: Given) -> Any:
        model, optimizer = build(fused=True)
        guard = given.make(model=model, optimizer=optimizer)
        for loss in computed(given, model, guard.over(Reshuffled(given))):
            if guard.ok(loss):
                optimizer.step()
            optimizer.zero_grad()
        return strange_loops.end(model, optimizer)

    ended, guard = guarded(loop, tmp_path / "run", sync=False)
    assert guard.skipped == [(9, 10), (29, 30)]
    plain = loop(Given(lambda **given: NoGuard(guard.skipped, **given), (), lambda: None))
    guard.close()
    assert digest(plain) == digest(ended)


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    """Draws from the global generator for each sample that is read."""

    def __init__(self, samples: torch.Tensor) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._samples[number] + 0.01 * torch.randn(DIM)


def test_our_sampler_over_data_that_draws(tmp_path: Path) -> None:
    def loop(given: Given) -> Any:
        def read() -> Any:
            sampler = Sampler(len(given.samples()), global_size=4, seed=2)
            return DataLoader(Augmented(given.samples()), batch_sampler=sampler)

        return strange_loops.over(given, read)

    ended, guard = guarded(loop, tmp_path / "run")
    skipped = guard.skipped
    guard.close()

    def make(**given: Any) -> Guard:
        return Guard(tmp_path / "told", **RULES, skip=skipped, **given)

    assert digest(loop(Given(make, (), lambda: None))) == digest(ended)


# -- refused ----------------------------------------------------------------------------------


def refused(out: Path, loop: Callable[[Given], Any]) -> str:
    guards: list[Guard] = []

    def make(**given: Any) -> Guard:
        guards.append(Guard(out, **RULES, **given))
        return guards[-1]

    with pytest.raises(ConfigError) as error:
        loop(Given(make, (), lambda: None))
    for guard in guards:
        guard._finalizer()
    return str(error.value)


def test_weights_that_change_before_the_question_are_refused(tmp_path: Path) -> None:
    def steps_first(given: Given) -> None:
        model, optimizer = build()
        guard = given.make(model=model, optimizer=optimizer)
        for loss in computed(given, model, guard.over(given.batches())):
            optimizer.step()
            guard.ok(loss)

    assert "'first.weight' (and " in refused(tmp_path / "a", steps_first)

    def averages_in_forward(given: Given) -> None:
        model = nn.ModuleDict({"query": nn.Linear(DIM, 1), "key": nn.Linear(DIM, 1)})
        optimizer = torch.optim.SGD(model["query"].parameters(), lr=1e-2)
        guard = given.make(model=model, optimizer=optimizer)
        for batch in guard.over(given.batches()):
            for key, query in zip(
                model["key"].parameters(), model["query"].parameters(), strict=True
            ):
                key.data = key.data * 0.9 + query.data * 0.1
            loss = (model["query"](batch) - model["key"](batch).detach()).square().mean()
            loss.backward()
            if guard.ok(loss):
                optimizer.step()

    assert "'key.weight'" in refused(tmp_path / "b", averages_in_forward)


def test_a_question_without_gradients_is_refused(tmp_path: Path) -> None:
    def asks_too_early(given: Given) -> None:
        model, optimizer = build()
        guard = given.make(model=model, optimizer=optimizer)
        for batch in guard.over(given.batches()):
            loss = model(batch).square().mean()
            if guard.ok(loss):
                loss.backward()

    assert "no parameter of the optimizers has a gradient" in refused(tmp_path, asks_too_early)


@pytest.mark.parametrize("loss", [None, "x", [1.0], torch.zeros(0), torch.tensor(1j)])
def test_what_is_no_loss_is_refused(tmp_path: Path, loss: Any) -> None:
    def loop(given: Given) -> None:
        model, optimizer = build()
        guard = given.make(model=model, optimizer=optimizer)
        for batch in guard.over(given.batches()):
            model(batch).mean().backward()
            guard.ok(loss)

    assert "guard.ok: the loss is" in refused(tmp_path, loop)


def test_data_that_is_not_the_same_again_is_refused(tmp_path: Path) -> None:
    count = iter(range(10))

    def loop(given: Given) -> Any:
        generator = torch.Generator().manual_seed(next(count))
        return strange_loops.over(
            given, lambda: (torch.randn(4, DIM, generator=generator) for _ in range(40))
        )

    with pytest.raises(ConfigError, match=r"does not give the batch \d+ that it gave before"):
        guarded(loop, tmp_path / "run")


class Perturbing(torch.optim.Optimizer):
    """An optimizer around another one, which keeps its own state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)


class ZeroRedundancyOptimizer(torch.optim.SGD):
    pass


class FullyShardedDataParallel(nn.Module):
    pass


def arguments() -> dict[str, tuple[dict[str, Any], str]]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "no module": ({"model": len}, "model=builtins.builtin_function_or_method"),
        "none": ({"model": []}, "model= is empty"),
        "no optimizer": ({"optimizer": [model.last.weight]}, "must be a torch.optim.Optimizer"),
        "no schedule": ({"scheduler": 3}, "needs state_dict"),
        "no number": ({"clip": "1"}, "clip='1'"),
        "no count": ({"accumulate": 2.0}, "accumulate=2.0"),
        "no ranges": ({"skip": 3}, "skip=3"),
        "inner": ({"optimizer": Perturbing(model.parameters())}, r"give both: .*perturbing.base"),
        "zero": (
            {"optimizer": ZeroRedundancyOptimizer(model.parameters(), lr=0.1)},
            "each rank holds the state of a part",
        ),
        "fsdp1": ({"model": FullyShardedDataParallel()}, "FSDP1"),
        "lazy": ({"model": nn.LazyLinear(1)}, "has no values yet"),
        "closure": (
            {"optimizer": torch.optim.LBFGS(model.parameters()), "clip": 1.0},
            "computes its gradients again",
        ),
        "another": ({"model": model, "optimizer": optimizer, "evry": 3}, "evry=3"),
    }


@pytest.mark.parametrize("name", arguments())
def test_what_cannot_be_guarded_is_named(tmp_path: Path, name: str) -> None:
    given, words = arguments()[name]
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=words):
        Guard(tmp_path, **{"model": model, "optimizer": optimizer, **given})


def test_a_parameter_that_came_later_is_refused(tmp_path: Path) -> None:
    def loop(given: Given) -> None:
        model, optimizer = build()
        guard = given.make(model=model, optimizer=optimizer)
        for loss in computed(given, model, guard.over(given.batches())):
            if guard.updates == 3:
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
            guard.ok(loss)

    assert "was given a parameter after Guard" in refused(tmp_path, loop)


def test_other_groups_at_the_start_are_refused(tmp_path: Path) -> None:
    model, optimizer = build()
    with Guard(tmp_path, model=model, optimizer=optimizer):
        pass
    groups = [{"params": [p]} for p in model.parameters()]
    with pytest.raises(CheckpointError, match="began with other groups of parameters"):
        Guard(tmp_path, model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2))


@pytest.mark.full
def test_ranks_that_differ_are_refused_alike(tmp_path: Path) -> None:
    first, second = ends_of("strange_ranks.py", tmp_path, str(tmp_path))
    assert first == second
    assert "the ranks' gradients differ" in first["unwrapped"]
    assert "the ranks' weights differ" in first["unwrapped_and_seeded_by_rank"]
    assert "'bias' is torch.float32 [1] on rank 0, torch.float32 [2]" in first["stages"]
    assert "loaders have [6, 5] batches" in first["shorter"]


def test_the_names_that_loaders_are_read_by_are_still_there() -> None:
    datasets = pytest.importorskip("datasets")
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    rows = datasets.Dataset.from_dict({"x": [1, 2, 3]}).to_iterable_dataset()
    assert not _loses_a_buffer(rows) and not _loses_a_buffer(rows.batch(2))
    assert _loses_a_buffer(rows.shuffle(seed=1, buffer_size=2).batch(2))
    loader = torchdata.StatefulDataLoader([1, 2, 3])
    list(loader)
    loader.load_state_dict(loader.state_dict())
    assert loader.next_iter_state is not None and callable(loader._get_iterator)
    assert DataLoader([1, 2, 3])._iterator is None  # type: ignore[arg-type]


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


@pytest.mark.parametrize("workers", [0, full(1)])
def test_a_stream_of_torchdatas_loader_goes_on_where_it_was_at_each_start(workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    begun, state, read = None, None, list[int]()
    for drawn in (0, 2, 4):
        source = source_of(torchdata.StatefulDataLoader(Stream(), 2, num_workers=workers))
        if drawn:
            source.resume(begun, state, drawn, is_over=False)
        else:
            begun = source.begin()
        read += [*source.read(drawn).tolist(), *source.read(drawn + 1).tolist()]
        state = source.state()
    assert read == [*range(12)]


@pytest.mark.parametrize(("drawn", "is_over"), [(3, False), (8, False), (8, True)])
@pytest.mark.parametrize("workers", [0, full(2)])
def test_torchdatas_loader_shuffles_the_next_pass_as_if_it_had_not_been_left(
    workers: int, drawn: int, is_over: bool
) -> None:
    """By a generator of its own, from which it draws more than an order."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def source() -> Any:
        dice = torch.Generator().manual_seed(11)
        data = [*range(8)]
        return source_of(
            torchdata.StatefulDataLoader(
                data, batch_size=None, shuffle=True, num_workers=workers, generator=dice
            )
        )

    def rest(one: Any) -> list[int]:
        """Of the pass, and the next one."""
        read = [int(one.read(number)) for number in range(one.drawn, 8)]
        with pytest.raises(Exhausted):
            one.read(8)
        one.begin()
        return read + [int(one.read(number)) for number in range(8)]

    whole, again = source(), source()
    whole.begin()
    for number in range(drawn):
        whole.read(number)
    if is_over:
        with pytest.raises(Exhausted):
            whole.read(drawn)
    state = pack(whole.state(), "the loader")
    then = rest(whole)
    again.resume(None, unpack(state), drawn, is_over=is_over)
    assert rest(again) == then
    whole.resume(None, unpack(state), drawn, is_over=is_over)  # a rollback
    assert rest(whole) == then


# -- the process ------------------------------------------------------------------------------


def test_a_forked_process_leaves_the_run_alone(tmp_path: Path) -> None:
    """It dies of a signal as ever, and its end is not that of the run."""
    model, optimizer = build()
    signals = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)]
    guard = Guard(tmp_path / "run", model=model, optimizer=optimizer)
    try:
        child = os.fork()
        if child == 0:
            guard._finalizer()
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        assert not guard._run.group.stop.is_set
        for batch in guard.over([torch.ones(4, DIM)]):
            loss = model(batch).square().mean()
            loss.backward()
            assert guard.ok(loss)
            optimizer.step()
        guard.close()
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGUSR1), signals, strict=True):
            signal.signal(number, handler)


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model, optimizer = build()
    guard = Guard("run", model=model, optimizer=optimizer, every=2)
    monkeypatch.chdir(tmp_path / "elsewhere")
    for batch in guard.over([torch.ones(4, DIM)] * 5):
        loss = model(batch).square().mean()
        loss.backward()
        if guard.ok(loss):
            optimizer.step()
    guard.close()
    assert not list(Path().iterdir())
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_left_with_batches_in_hand_whose_reading_drew(tmp_path: Path, accumulate: int) -> None:
    """The next start reads them as if nobody had read them before."""

    def trained(out: Path, *stops: int) -> Any:
        for stop in stops:
            model, optimizer = build()
            with Guard(
                out, model=model, optimizer=optimizer, accumulate=accumulate, **RULES
            ) as guard:
                windows = strange_loops.Windows(Given(lambda: None, (), lambda: None))
                for number, batch in enumerate(guard.over(windows), start=1):
                    loss = model(batch).square().mean() / accumulate
                    loss.backward()
                    if number % accumulate:
                        continue
                    if guard.updates == stop:
                        break
                    if guard.ok(loss):
                        optimizer.step()
                    optimizer.zero_grad()
        return digest(strange_loops.end(model, optimizer))

    assert trained(tmp_path / "a", 7, 8, -1) == trained(tmp_path / "b", -1)

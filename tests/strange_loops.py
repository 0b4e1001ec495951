"""Loops that strangers write, for test_strange_loops.py: what they do beside a plain loop.

Each is given the guard as a factory and returns what it ends with, bit for bit. ``tick`` is called
once a batch; there the process may be killed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, random_split

NUM, PER, DIM = 40, 4, 6
NAN = float("nan")


@dataclass
class Given:
    """What a loop is given: ``make`` makes the guard, samples of the batches in ``bad`` are NaN."""

    make: Callable[..., Any]
    bad: tuple[int, ...]
    tick: Callable[[], None]

    def samples(self, num: int = NUM) -> torch.Tensor:
        samples = torch.randn(num * PER, DIM, generator=torch.Generator().manual_seed(3))
        for number in self.bad:
            if number < num:
                samples[number * PER] = NAN
        return samples

    def batches(self) -> list[torch.Tensor]:
        return list(self.samples().view(NUM, PER, DIM))


class Net(nn.Module):
    """Dropout, running statistics, a counter, and a mean that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.norm, self.drop = nn.BatchNorm1d(DIM), nn.Dropout(0.1)
        self.register_buffer("mean", None)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        now = x.detach().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        hidden = self.norm(self.first(x - self.mean / self.count))
        return self.last(self.drop(torch.tanh(hidden)))


def build(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def end(model: nn.Module, *others: Any) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "others": [one.state_dict() for one in others],
        "random": torch.get_rng_state(),
    }


def computed(given: Given, model: nn.Module, batches: Iterable[Any], share: int = 1) -> Any:
    """The loss of each batch, whose gradients are there."""
    for item in batches:
        given.tick()
        item = item["x"] if isinstance(item, dict) else item
        batch = item[0] if isinstance(item, list | tuple) else item
        loss = model(batch).square().mean() / share
        loss.backward()
        yield loss


def over(given: Given, loader: Callable[[], Iterable[Any]], epochs: int = 1, **kw: Any) -> Any:
    """A plain loop over some loader, which is made after the guard."""
    model, optimizer = build()
    guard = given.make(model=model, optimizer=optimizer)
    read = loader()
    for _ in range(epochs):
        for loss in computed(given, model, guard.over(read, **kw)):
            if guard.ok(loss):
                optimizer.step()
            optimizer.zero_grad()
    return end(model, optimizer)


# -- what is under `if guard.ok`, and what is not ------------------------------------------------


def schedule_and_evaluation_outside(given: Given) -> Any:
    model, optimizer = build()
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.7)
    held_out = DataLoader(torch.randn(12, DIM), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    guard = given.make(model=model, optimizer=optimizer, scheduler=schedule)
    for loss in computed(given, model, guard.over(given.batches())):
        if guard.ok(loss.item()):
            optimizer.step()
        optimizer.zero_grad()
        if guard.updates % 3 == 0:  # and once more where the batch after it is discarded
            schedule.step(sum(model(x).square().mean() for x in held_out))  # type: ignore[arg-type]
    return end(model, optimizer, schedule)


def unfrozen_with_a_group_of_its_own(given: Given) -> Any:
    torch.manual_seed(5)
    model = Net()
    model.first.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    guard = given.make(model=model, optimizer=optimizer)
    for batch in guard.over(given.batches()):
        given.tick()
        if guard.updates == 12 and len(optimizer.param_groups) == 1:
            model.first.requires_grad_(True)
            model.norm.eval()
            optimizer.add_param_group({"params": [*model.first.parameters()], "lr": 1e-3})
        loss = model(batch).square().mean()
        loss.backward()
        if guard.ok(loss):
            optimizer.step()
        model.zero_grad()
    return end(model, optimizer)


def scaled_fp16(given: Given, **options: Any) -> Any:
    """A scale that begins too high, so that it overflows on its own."""
    model, optimizer = build(**options)
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=NUM)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=6)
    guard = given.make(model=model, optimizer=optimizer, scheduler=[schedule, scaler], clip=0.5)
    for batch in guard.over(given.batches()):
        given.tick()
        with torch.autocast("cpu", torch.float16):
            loss = model(batch).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if guard.ok(loss):
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        optimizer.zero_grad()
    return end(model, optimizer, schedule, scaler)


def averaged_in_bf16_with_two_optimizers(given: Given) -> Any:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Dropout(0.1))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)  # type: ignore[no-untyped-call]
    weights = list(model.parameters())
    first = torch.optim.NAdam(weights[:2], lr=1e-2)
    second = torch.optim.RMSprop([{"params": weights[2:3], "lr": 1e-3}, {"params": weights[3:]}])
    schedule = lr_scheduler.SequentialLR(
        second, [lr_scheduler.LinearLR(second, total_iters=5), lr_scheduler.StepLR(second, 7)], [5]
    )
    guard = given.make(
        model=[model, average], optimizer=[first, second], scheduler=schedule, accumulate=2
    )
    for number, batch in enumerate(guard.over(given.batches()), start=1):
        given.tick()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch).square().mean() / 2
        loss.backward()
        if number % 2:
            guard.note(loss)
            continue
        if guard.ok(loss):
            first.step()
            second.step()
            schedule.step()
            average.update_parameters(model)
        model.zero_grad()
    return end(model, first, second, schedule, average)


def left_by_break(given: Given) -> Any:
    model, optimizer = build()
    guard = given.make(model=model, optimizer=optimizer)
    loader = DataLoader(TensorDataset(given.samples()), batch_size=PER, shuffle=True)
    for epoch in (1, 2, 3):
        for loss in computed(given, model, guard.over(loader)):
            if guard.ok(loss):
                optimizer.step()
            optimizer.zero_grad()
            if guard.updates >= 14 * epoch:
                break
    return end(model, optimizer)


def lbfgs_by_next(given: Given) -> Any:
    torch.manual_seed(5)
    model = nn.Linear(DIM, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)
    guard = given.make(model=model, optimizer=optimizer)
    batches = iter(guard.over(given.batches()))
    while (batch := next(batches, None)) is not None:
        given.tick()

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(batch).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        if guard.ok(closure()):
            optimizer.step(closure)
    return end(model, optimizer)


# -- loaders ----------------------------------------------------------------------------------


def endless_over_a_shuffled_loader(given: Given) -> Any:
    """Each pass draws its order from the generator that dropout draws from as well."""

    def read() -> Iterator[Any]:
        loader = DataLoader(TensorDataset(given.samples(10)), batch_size=PER, shuffle=True)
        while True:
            yield from loader

    return over(given, read, steps=30)


def cycle_begun_after_the_guard(given: Given) -> Any:
    def read() -> Any:
        part, _ = random_split(TensorDataset(given.samples()), [100, len(given.samples()) - 100])
        return iter(DataLoader(part, batch_size=PER, shuffle=True))

    return over(given, lambda: itertools.chain(read(), read()))


def random_windows(given: Given) -> Any:
    """As nanoGPT draws its batches."""

    def read() -> Iterator[torch.Tensor]:
        samples = given.samples()
        for _ in range(NUM):
            yield samples[torch.randint(len(samples), (PER,))]

    return over(given, read)


# Of steps of two batches: the first, the second, and three steps in a row.
BAD_OF_TWO = (8, 19, 41, 43, 44)


class Windows:
    """Random windows, drawn from a generator of the process: torch's or NumPy's."""

    def __init__(self, given: Given, *, by_numpy: bool = False) -> None:
        self.samples = torch.randn(50, DIM, generator=torch.Generator().manual_seed(3))
        self.bad, self.by_numpy = BAD_OF_TWO if given.bad else (), by_numpy

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(2 * NUM):
            if self.by_numpy:
                places = torch.from_numpy(np.random.randint(0, len(self.samples), PER))
            else:
                places = torch.randint(len(self.samples), (PER,))
            yield self.samples[places] * (NAN if number in self.bad else 1.0)


def accumulated(given: Given, loader: Any, dropout: float = 0.1, said: int = 2) -> Any:
    """Two batches a step; dropout draws from torch's generator between their reads."""
    model, optimizer = build()
    model.drop.p = dropout  # type: ignore[union-attr, assignment]
    guard = given.make(model=model, optimizer=optimizer, accumulate=said)
    for number, loss in enumerate(computed(given, model, guard.over(loader), share=2)):
        if number % 2 == 0:
            guard.note(loss)
            continue
        if guard.ok(loss):
            optimizer.step()
        optimizer.zero_grad()
    return end(model, optimizer) | {"numpy": np.random.get_state()[1:3]}


def random_windows_accumulated(given: Given) -> Any:
    """As nanoGPT does: what the second batch is depends on the forward pass of the first."""
    return accumulated(given, Windows(given))


def random_windows_accumulated_and_not_said(given: Given) -> Any:
    return accumulated(given, Windows(given), said=1)


def random_windows_accumulated_by_a_generator(given: Given) -> Any:
    return accumulated(given, iter(Windows(given)))


def random_windows_accumulated_without_dropout(given: Given) -> Any:
    return accumulated(given, iter(Windows(given)), dropout=0.0)


def random_windows_of_numpy_accumulated(given: Given) -> Any:
    """Another generator than that of dropout, as dropout's is on a GPU."""
    return accumulated(given, iter(Windows(given, by_numpy=True)))


def shuffled_loader_with_augmentation_accumulated(given: Given) -> Any:
    samples = given.samples()
    augmented = [(number,) for number in range(len(samples))]

    def collate(rows: list[tuple[int]]) -> torch.Tensor:
        return samples[[number for [number] in rows]] + 0.01 * torch.randn(PER, DIM)

    return accumulated(
        given,
        DataLoader(augmented, batch_size=PER, shuffle=True, collate_fn=collate),  # type: ignore[arg-type]
    )


def a_generator_that_draws_and_has_no_beginning(given: Given) -> Any:
    """A rollback ends the process, and the next start goes on."""

    def read() -> Iterator[torch.Tensor]:
        for batch in given.batches():
            yield batch + 0.01 * torch.rand(())

    return over(given, read)


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, samples: torch.Tensor) -> None:
        self.samples, self.order = samples, np.random.default_rng(3)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([self.samples[i] for i in self.order.permutation(len(self.samples))])


def stream_with_its_own_generator(given: Given) -> Any:
    stream = Stream(given.samples(20))
    return over(given, lambda: DataLoader(stream, batch_size=PER), epochs=2)


def workers_that_stay(given: Given) -> Any:
    data = TensorDataset(given.samples(20))
    return over(
        given,
        lambda: DataLoader(
            data, batch_size=PER, shuffle=True, num_workers=1, persistent_workers=True
        ),
        epochs=2,
    )


def hugging_face_stream(given: Given) -> Any:
    import datasets

    datasets.disable_progress_bars()  # type: ignore[attr-defined]
    rows = datasets.Dataset.from_dict({"x": given.samples(20).tolist()})
    stream = rows.to_iterable_dataset().shuffle(seed=3, buffer_size=30).with_format("torch")

    return over(given, lambda: stream.batch(PER))

"""A user's training script, as a case says: python loop.py out=FOLDER CASE.json guarded|plain

``plain`` is the same loop without a guard, which reads the batches that the guarded one skipped
and does not use them. Each rank leaves what it ends with, and the batches that were bad.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from runner import Guard, Ring, Sampler
from runner.system.error import RunnerError
from runner.system.json_lines import read_lines
from scripts.swarm.case import Case, read
from scripts.swarm.command import limits
from scripts.swarm.guests import Ids, Net
from tests.frameworks import digest

NUM, PER, SEQ_LEN = 36, 4, 12  # whole steps of 1, 2 or 3 batches
FITS = 2  # samples of a part, where one of them is large
EVERY = 6
SHARDED = ("fsdp", "mesh")
TENSOR = 2  # ranks of a mesh that compute a batch together: layers are split, the rest is twice
_RULES: dict[str, Any] = {"every": EVERY, "clean_after": 3, "min_history": 8}
_EVAL_PARTS = {"eval_norm", "eval_drop"}


class PlainGuard:
    """No guard: batches of the ranges in ``skipped`` are read, and not given out."""

    resumed_step = 0

    def __init__(self, out: Path, case: Case, model: nn.Module) -> None:
        skipped = json.loads((out / "skipped.json").read_text())
        self._skipped = {n for start, stop in skipped for n in range(start, stop)}
        lines, _ = read_lines(out / "run" / "journal.jsonl")
        full = [line["detail"] for line in lines if line["kind"] == "out_of_memory"]
        self._parts = [(one["from_step"], one["parts"]) for one in full if "parts" in one]
        self._model, self._clip = model, case.clip
        self._leaves_out_full = case.out_of_memory == "skip"
        self.updates = 0
        self.bad: list[int] = []
        self.large: list[int] = []
        self.logged: list[list[float]] = [[0.0, 0.0]]  # of each step

    def over(self, loader: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        for number, batch in enumerate(loader):
            if bool((batch < 0).any()):
                self.bad.append(number)
            if self._leaves_out_full and _is_large(batch):
                self.large.append(number)
            if number not in self._skipped:
                yield batch

    def parts(self, batch: torch.Tensor) -> Iterator[tuple[torch.Tensor, float]]:
        due = [parts for step, parts in self._parts if step <= self.updates + 1]
        rows, num = len(batch), min(max(due, default=1), len(batch))
        for number in range(num):
            part = batch[rows * number // num : rows * (number + 1) // num]
            yield part, len(part) / rows

    def log(self, read: tuple[float, int]) -> None:
        for at, value in enumerate(read):
            self.logged[-1][at] += value

    def note(self, loss: Any) -> None:
        pass

    def ok(self, loss: Any) -> bool:
        if self._clip:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self.updates += 1
        self.logged.append([0.0, 0.0])
        return True

    def check_stop(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Own:
    """Any iterable of one's own."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._batches)


def _samples(case: Case, rank: int, num: int) -> torch.Tensor:
    ids = Ids(SEQ_LEN, salt=rank)
    samples = torch.stack([torch.from_numpy(ids[i]["input_ids"]) for i in range(num)])
    for number in case.bad if rank == 0 else ():
        samples[number * PER % num, 0] = -1
    for number in case.full if rank == 0 else ():
        samples[(number * PER + 1) % num] = 1
    return samples


def _is_large(batch: torch.Tensor) -> bool:
    """Whether it has a sample of one token only."""
    return bool((batch == 1).all(dim=1).any())


def _windows(samples: torch.Tensor) -> Iterator[torch.Tensor]:
    for _ in range(NUM):
        yield samples[torch.randint(len(samples), (PER,))]


def _global_size(case: Case) -> int:
    return PER * case.ranks


def _loader(case: Case, rank: int) -> Any:
    if case.data == "sampler":  # the same global batches on any number of ranks
        samples = _samples(case, 0, NUM * _global_size(case))
        return DataLoader(
            samples,  # type: ignore[arg-type]
            batch_sampler=Sampler(len(samples), global_size=_global_size(case), seed=case.seed),
        )
    samples = _samples(case, rank, NUM * PER)
    if case.data == "stateful":
        torchdata = importlib.import_module("torchdata.stateful_dataloader")
        return torchdata.StatefulDataLoader(samples, batch_size=PER, shuffle=True)
    if case.data == "shuffled":
        return DataLoader(samples, batch_size=PER, shuffle=True)  # type: ignore[arg-type]
    if case.data == "windows":
        return _windows(samples)
    batches = list(samples.view(NUM, PER, -1))
    return _Own(batches) if case.data == "own" else batches


def _wrapped(case: Case, net: Net) -> nn.Module:
    if case.engine == "ddp":
        return DistributedDataParallel(net)
    if case.engine in SHARDED:
        tensor = TENSOR if case.engine == "mesh" else 1
        shape = dist.get_world_size() // tensor, tensor
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        for layer in net.layers:
            if tensor > 1:
                whole = ColwiseParallel(output_layouts=Replicate())
                parallelize_module(layer, mesh["tp"], whole)
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(net, mesh=mesh["dp"])
    return net


class _Average:
    """The average of a net's weights, sharded as they are; none without ``ema``."""

    def __init__(self, case: Case, net: Net) -> None:
        self.models: list[nn.Module] = []
        if case.ema:
            averaged = copy.deepcopy(net).requires_grad_(False)
            self.models = [_wrapped(case, averaged) if case.engine in SHARDED else averaged]

    def update(self, net: nn.Module) -> None:
        for model in self.models:
            for mine, new in zip(model.parameters(), net.parameters(), strict=True):
                mine.mul_(0.8).add_(new.detach(), alpha=0.2)


def _build(case: Case) -> tuple[Net, nn.Module, torch.optim.Optimizer, _Average]:
    torch.manual_seed(case.seed)
    net = Net(traits=case.model, units=case.units)
    if case.precision == "bf16":
        net.bfloat16()
    average = _Average(case, net)
    model = _wrapped(case, net)
    torch.manual_seed(case.seed + 100 + _share(case))
    trained = [p for p in model.parameters() if p.requires_grad]
    if case.optim == "sgd":
        rate = 0.1 / case.units
        sgd = torch.optim.SGD(trained, lr=rate, momentum=0.9, fused=case.late or None)
        return net, model, sgd, average
    return net, model, torch.optim.AdamW(trained, lr=1e-2, fused=case.late or None), average


def _look(net: Net, model: nn.Module, batch: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        loss = float(model(batch.clamp(min=0)))
    model.train()
    if _EVAL_PARTS & set(net.traits):
        net.kept.eval()
    return loss


class _Ending:
    """Where this start ends: as its N-th batch, or its N-th evaluation, begins."""

    def __init__(self, how: str = "", at: str = "") -> None:
        phase, _, number = at.partition(":")
        self._how, self._due = how, (phase, int(number or 0))
        self._evaluations = 0

    def evaluation(self) -> None:
        self._evaluations += 1
        self.meet("evaluate", self._evaluations)

    def meet(self, phase: str, number: int) -> None:
        rank, ranks = _place()
        if (phase, number) != self._due:
            return
        if self._how == "kill" or (self._how == "kill_one" and rank == ranks - 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how == "term" and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def _ending(case: Case, out: Path) -> _Ending:
    start = len(list(out.glob("start-*")))
    one = case.breaks[start] if start < len(case.breaks) else None
    return _Ending(one.how, one.at) if one else _Ending()


def train(case: Case, guard: Any, parts: Any, loader: Any, ending: _Ending) -> None:
    """The loop, as a user writes it."""
    net, model, optimizer, scheduler, average = parts
    held_out = _samples(Case(), 9, PER)
    for number, batch in enumerate(guard.over(loader), start=1):
        ending.meet("batch", number)
        losses = [_backward(case, model, batch, *part) for part in guard.parts(batch)]
        # One is handed over as it is, with its graph.
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).detach().sum()
        if case.logs:
            guard.log(read=(float(batch.clamp(min=0).sum()), len(batch)))
        if number % case.accumulate:
            guard.note(loss)
            continue
        if guard.ok(loss):
            optimizer.step()
            scheduler.step()
            average.update(net)
        optimizer.zero_grad()
        if case.evaluate and guard.updates % case.evaluate == 0:
            ending.evaluation()
            if case.checks_stop:
                guard.check_stop()
            _look(net, model, held_out)


def _backward(
    case: Case, model: nn.Module, batch: torch.Tensor, part: torch.Tensor, share: float
) -> torch.Tensor:
    """The part's loss, of whose gradient each batch of a step has its share."""
    if case.out_of_memory and _share(case) == 0 and len(part) > FITS and _is_large(part):
        raise torch.OutOfMemoryError("CUDA out of memory. (On purpose.)")
    loss: torch.Tensor = model(part) * share / case.accumulate
    if case.data == "sampler":  # a rank may have one sample more
        loss = loss * len(batch) * _place()[1] / _global_size(case)
    loss.backward()
    return loss


def with_ring(case: Case, out: Path, parts: Any, batches: Any, ending: _Ending, mode: str) -> None:
    """A loop with a ring and no guard."""
    _, model, optimizer, scheduler, _ = parts
    state = {"model": model, "opt": optimizer, "schedule": scheduler}
    ring = None if mode == "plain" else Ring(out / "run", state)
    first = ring.step if ring is not None else 0
    for step in range(first, NUM):
        ending.meet("batch", step - first)
        torch.manual_seed(step)  # what a ring does not keep
        model(batches[step].clamp(min=0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if ring is not None and (step + 1) % 4 == 0:
            ring.save(step + 1, wait=not case.late)
    if ring is not None:
        ring.close()


def _own(value: Any) -> str:
    """The digest of this rank's part."""
    parts = tree_map(lambda one: one.to_local() if isinstance(one, DTensor) else one, value)
    return digest(parts)


def _place() -> tuple[int, int]:
    """Rank and number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def numbers(case: Case) -> dict[str, int]:
    """The further settings of a guard."""
    return {key: int(value) for key, value in (word.split("=") for word in case.settings)}


def _share(case: Case) -> int:
    """Which share of each step's data this rank has."""
    return _place()[0] // (TENSOR if case.engine == "mesh" else 1)


def run(case: Case, out: Path, mode: str) -> None:
    rank, _ = _place()
    ending = _ending(case, out) if mode == "guarded" else _Ending()
    if dist.is_initialized():
        dist.barrier()  # before this start is counted
    if rank == 0:
        (out / f"start-{len(list(out.glob('start-*')))}").touch()
    net, model, optimizer, average = _build(case)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))
    parts = net, model, optimizer, scheduler, average
    if case.looked:
        with torch.no_grad():
            model(_samples(Case(), 9, PER).clamp(min=0))
    ended: dict[str, Any] = {}
    if case.ring_alone:
        with_ring(case, out, parts, _loader(case, _share(case)), ending, mode)
    elif mode == "plain":
        plain = PlainGuard(out, case, model)
        train(replace(case, out_of_memory=""), plain, parts, _loader(case, _share(case)), ending)
        ended = {"bad": plain.bad, "large": plain.large, "logged": plain.logged[:-1]}
    else:
        settings = {**_RULES, "sync": not case.late, "accumulate": case.accumulate}
        settings |= limits(case) | ({} if case.memory else {"memory_every": 0})
        settings |= {"memory_mirror": True} if case.mirror else {}
        settings |= {"background": False} if case.waits else {}
        settings |= {"on_oom": case.out_of_memory} if case.out_of_memory else {}
        settings |= numbers(case)
        guard = Guard(
            out / "run", model=[model, *average.models], optimizer=optimizer, scheduler=scheduler,
            clip=case.clip or None, **settings,
        )  # fmt: skip
        train(case, guard, parts, _loader(case, _share(case)), ending)
        guard.close()
        ended = {"skipped": guard.skipped}
    random = None if case.ring_alone else torch.get_rng_state()
    ended["digests"] = {
        "model": _own(model.state_dict()),
        "optimizer": _own(optimizer.state_dict()["state"]),
        "scheduler": digest(scheduler.state_dict()),
        "random": digest(random),
        "average": _own([one.state_dict() for one in average.models]),
    }
    ended["loss"] = _look(net, model, _samples(Case(), 9, PER))
    (out / f"end-{mode}-{rank}.json").write_text(json.dumps(ended))


def main() -> None:
    out, file, mode = Path(sys.argv[1].removeprefix("out=")), Path(sys.argv[2]), sys.argv[3]
    case = read(file)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    try:
        run(case, out, mode)
    except RunnerError as error:
        if isinstance(error, SystemExit):
            raise
        print(f"refused: {type(error).__name__}: {error}", flush=True)
        os._exit(error.exit_code)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Faults on purpose: how they are written, and that each happens when and where it was asked."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from runner.fault.inject import Disturbance, DrillError, FaultInjector
from runner.fault.spec import KINDS, Fault, parse_faults
from runner.fault.wrap import FaultyHeart, MicroBatchFaults, wrap_engine, wrap_group, wrap_heart
from runner.system.error import ConfigError
from runner.system.process import host_name


def parse(text: str) -> Fault:
    (fault,) = parse_faults([text])
    return fault


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nan_grad@step=20,rank=1", {"kind": "nan_grad", "steps": (20, 21), "rank": 1}),
        ("nan_grad@step=20", {"kind": "nan_grad", "steps": (20, 21), "rank": None}),
        ("poison@samples=400-431", {"kind": "poison", "samples": (400, 432)}),
        ("poison@samples=400", {"kind": "poison", "samples": (400, 401)}),
        ("spike@samples=4-7,scale=2.5", {"kind": "spike", "samples": (4, 8), "scale": 2.5}),
        ("spike@samples=4-7", {"kind": "spike", "samples": (4, 8), "scale": 50.0}),
        ("wrong@step=3,host=gpu-7", {"kind": "wrong", "steps": (3, 4), "host": "gpu-7"}),
        ("hang@step=30-32,rank=1", {"kind": "hang", "steps": (30, 33), "rank": 1}),
        ("mismatch@step=30, rank=1", {"kind": "mismatch", "steps": (30, 31), "rank": 1}),
        (
            "slow@step=30-60,rank=1,seconds=0.2",
            {"kind": "slow", "steps": (30, 61), "rank": 1, "seconds": 0.2},
        ),
        ("corrupt_checkpoint@step=40", {"kind": "corrupt_checkpoint", "steps": (40, 41)}),
    ],
)
def test_what_is_understood(text: str, expected: dict[str, object]) -> None:
    fault = parse(text)
    assert fault == Fault(text=text, **expected)  # type: ignore[arg-type]


def test_many_keep_their_order() -> None:
    texts = ["kill@step=3", "poison@samples=1-2", "kill@step=3"]
    assert [fault.text for fault in parse_faults(texts)] == texts
    assert parse_faults([]) == ()


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("", ["kinds: ", *KINDS]),
        ("melt@step=3", ["kinds: ", *KINDS]),
        ("kill", ["KIND@key=value"]),
        ("kill@", ["kill needs step"]),
        ("slow@rank=1", ["slow needs seconds, step"]),
        ("poison@samples=3,rank=1", ["poison knows no rank", "takes samples"]),
        ("corrupt_checkpoint@step=3,rank=1", ["knows no rank", "takes step"]),
        (
            "kill@step=3,seconds=2",
            ["kill knows no seconds", "takes at, call, host, observer, rank, step"],
        ),
        ("kill@step", ["'step' is not key=value"]),
        ("kill@step=soon", ["step=soon", "whole number"]),
        ("kill@step=1.5", ["step=1.5", "whole number"]),
        ("kill@step=5-3", ["step=5-3", "backwards"]),
        ("kill@step=3,rank=one", ["rank=one", "0 or more"]),
        ("kill@step=3,rank=-1", ["rank=-1", "0 or more"]),
        ("kill@step=3,rank=0.5", ["rank=0.5", "0 or more"]),
        ("slow@step=3,seconds=nan", ["seconds=nan", "0 or more"]),
        ("spike@samples=3,scale=-2", ["scale=-2", "0 or more"]),
        ("kill@step=3,step=4", ["step", "a key is repeated"]),
    ],
)
def test_what_is_refused(text: str, fragments: Sequence[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_faults(["kill@step=1", text])
    told = str(caught.value)
    assert told.startswith(f"faults: {text!r}: ")
    assert all(fragment in told for fragment in fragments)


# Made to happen


def injector(folder: Path, *texts: str, rank: int = 0) -> FaultInjector:
    return FaultInjector(parse_faults(texts), rank=rank, markers=folder / "faults")


@dataclass
class Files:
    """As a ring tells them."""

    checkpoint: Path | None = None
    snapshots: tuple[Path, ...] = ()

    def newest(self) -> Path | None:
        return self.checkpoint

    def snapshot_files(self) -> list[Path]:
        return list(self.snapshots)


def heart_of(
    folder: Path, text: str, files: Files, *, rank: int = 0, heart: Any = None
) -> FaultyHeart:
    found = wrap_heart(heart or Heart(), injector(folder, text, rank=rank), files)
    assert isinstance(found, FaultyHeart)
    return found


def steps_that_fire(one: FaultInjector, positions: Sequence[int | None] = (0, 1)) -> list[int]:
    fired = []
    for step in range(1, 8):
        one.before_step(step)
        if one.disturbance(positions) is not None:
            fired.append(step)
    return fired


def test_a_fault_of_a_host_does_not_follow_to_another(tmp_path: Path) -> None:
    here, away = (f"nan_grad@step=3,host={name}" for name in (host_name(), "elsewhere"))
    assert steps_that_fire(injector(tmp_path, here, rank=5)) == [3]
    one = injector(tmp_path, away)
    assert steps_that_fire(one) == [] and one.is_due(3), "all ranks agree that one is due"


@pytest.mark.parametrize("kind", ["nan_grad", "nan_loss"])
def test_a_fault_of_a_step_fires_once_a_run(tmp_path: Path, kind: str) -> None:
    texts = f"{kind}@step=3", f"{kind}@step=5"
    first = injector(tmp_path, *texts)
    assert steps_that_fire(first) == [3, 5]
    assert steps_that_fire(first) == []  # rolled back, the same steps again
    assert steps_that_fire(injector(tmp_path, *texts)) == []  # started again


def test_it_fires_once_on_each_rank_it_is_for(tmp_path: Path) -> None:
    everywhere = [injector(tmp_path, "nan_loss@step=3", rank=rank) for rank in range(3)]
    assert [steps_that_fire(one) for one in everywhere] == [[3], [3], [3]]
    one_rank = [injector(tmp_path, "nan_loss@step=4,rank=1", rank=rank) for rank in range(3)]
    assert [steps_that_fire(one) for one in one_rank] == [[], [4], []]


def test_only_the_first_micro_batch_of_the_step_is_hit(tmp_path: Path) -> None:
    one = injector(tmp_path, "nan_grad@step=3")
    one.before_step(3)
    assert one.disturbance([7, 8]) == Disturbance(
        activation_scale=(1.0, 1.0), loss_scale=(1.0, 1.0), nan_grad=True
    )
    one = injector(tmp_path, "nan_loss@step=3")
    one.before_step(3)
    hit = one.disturbance([7, None])
    assert hit is not None and hit.loss_scale is not None
    assert all(math.isnan(scale) for scale in hit.loss_scale)
    assert hit.nan_grad is False and hit.activation_scale == (1.0, 1.0)
    assert one.disturbance([8, 9]) is None


def test_faults_of_samples_happen_whenever_they_are_read(tmp_path: Path) -> None:
    texts = ("poison@samples=10-11", "spike@samples=20-21,scale=7")
    for one in (injector(tmp_path, *texts), injector(tmp_path, *texts, rank=3)):
        for step in (1, 2, 1):
            one.before_step(step)
            poisoned = one.disturbance([9, 10, None, 11, 12])
            assert poisoned is not None and poisoned.activation_scale is not None
            hit = [n for n, scale in enumerate(poisoned.activation_scale) if math.isnan(scale)]
            assert hit == [1, 3]
            assert one.disturbance([20, 22, None]) == Disturbance(
                activation_scale=(1.0, 1.0, 1.0), loss_scale=(7.0, 1.0, 1.0)
            )
            assert one.disturbance([12, 19, 22, None]) is None


class TestCorruptCheckpoint:
    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        folder = tmp_path / "000001-step-00000010"
        folder.mkdir()
        for number, size in enumerate([33, 8]):
            (folder / f"rank-{number:05d}.bin").write_bytes(os.urandom(size))
        (folder / "manifest.json").write_text("{}")
        return folder

    @staticmethod
    def contents(folder: Path) -> bytes:
        return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))

    def test_exactly_one_byte_is_flipped_once(self, tmp_path: Path, checkpoint: Path) -> None:
        before = self.contents(checkpoint)
        for _ in range(2):
            one = heart_of(tmp_path, "corrupt_checkpoint@step=3", Files(checkpoint))
            for step in (2, 3, 3):
                one.begin_step(step)
        after = self.contents(checkpoint)
        differing = [a ^ b for a, b in zip(before, after, strict=True) if a != b]
        assert differing == [0x10]

    def test_other_ranks_and_an_empty_ring_are_left_alone(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        before = self.contents(checkpoint)
        heart_of(tmp_path, "corrupt_checkpoint@step=3", Files(checkpoint), rank=1).begin_step(3)
        assert self.contents(checkpoint) == before
        heart_of(tmp_path, "corrupt_checkpoint@step=3", Files()).begin_step(3)
        heart_of(tmp_path, "corrupt_checkpoint@step=4", Files(tmp_path)).begin_step(4)

    def test_a_checkpoint_is_damaged_before_its_rank_ends_in_the_same_step(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        before = self.contents(checkpoint)
        texts = ("raise@step=3,at=fetch", "corrupt_checkpoint@step=3")
        one = wrap_heart(Heart(), injector(tmp_path, *texts), Files(checkpoint))
        with pytest.raises(DrillError):
            one.begin_step(3)
        assert self.contents(checkpoint) != before

    def test_every_snapshot_of_a_rank_is_damaged_once(self, tmp_path: Path) -> None:
        paths = [tmp_path / f"slot{number}" for number in range(2)]
        for path in paths:
            path.write_bytes(bytes(9))
        one = heart_of(tmp_path, "corrupt_snapshots@step=3", Files(snapshots=tuple(paths)), rank=1)
        for step in (2, 3, 3, 4):
            one.begin_step(step)
        assert [sum(path.read_bytes()) for path in paths] == [0x10, 0x10]


# Around the parts of a run


class Heart:
    """What a heartbeat is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def begin_step(self, step: int) -> None:
        self.told.append(step)

    def enter(self, phase: str, *, step: int | None = None) -> None:
        self.told.append(phase)


class Group:
    """Two ranks that always agree with this one."""

    world_size = 2

    def __init__(self) -> None:
        self.told: list[Any] = []

    def all_reduce(self, packed: torch.Tensor) -> None:
        self.told.append(tuple(packed.shape))

    def fingerprint(self, identity: dict[str, Any]) -> list[float]:
        self.told.append(dict(identity))
        return [float(identity["step"])]

    def require_alike(self, sums: Sequence[float], identity: dict[str, Any]) -> None:
        self.told.append((list(sums), dict(identity)))

    def may_repeat(self, step: int) -> bool:
        return True


def test_without_faults_nothing_is_wrapped(tmp_path: Path) -> None:
    none, heart, group = injector(tmp_path), Heart(), Group()
    assert steps_that_fire(none) == [] and not (tmp_path / "faults").exists()
    assert wrap_heart(heart, none, Files()) is heart
    assert wrap_group(group, none) is group
    assert wrap_engine(heart, none, MicroBatchFaults()) is heart


@pytest.mark.parametrize("point", ["fetch", "agree", "apply"])
def test_the_heart_shows_the_phase_in_which_a_rank_is_struck(tmp_path: Path, point: str) -> None:
    heart = Heart()
    struck = heart_of(tmp_path, f"raise@step=3,at={point}", Files(), heart=heart)

    def step(number: int) -> None:
        struck.begin_step(number)
        for phase in ("compute", "agree", "apply"):
            struck.enter(phase)
        struck.enter("read", step=number)

    step(2)
    before = len(heart.told)
    with pytest.raises(DrillError):
        step(3)
    assert (
        heart.told[before:]
        == {
            "fetch": [3],
            "agree": [3, "compute", "agree"],
            "apply": [3, "compute", "agree", "apply"],
        }[point]
    )
    step(3)  # it strikes once


def test_a_rank_claims_to_be_elsewhere_in_what_it_sends_and_in_what_it_tells(
    tmp_path: Path,
) -> None:
    one, group = injector(tmp_path, "mismatch@step=3,rank=0"), Group()
    faulty = wrap_group(group, one)
    one.before_step(3)
    assert faulty.fingerprint({"step": 3}) == [4.0]
    one.before_step(4)  # launched before the numbers of the third are read
    assert faulty.fingerprint({"step": 4}) == [4.0]
    faulty.require_alike([7.0], {"step": 3})
    faulty.require_alike([8.0], {"step": 4})
    assert group.told == [{"step": 4}, {"step": 4}, ([7.0], {"step": 4}), ([8.0], {"step": 4})]


def test_a_step_with_a_fault_is_not_launched_in_vain(tmp_path: Path) -> None:
    faulty = wrap_group(Group(), injector(tmp_path, "kill@step=3,rank=5", "slow@step=4,seconds=0"))
    assert [faulty.may_repeat(step) for step in (2, 3, 4)] == [True, False, True]
    assert faulty.world_size == 2


def test_a_collective_goes_wrong_in_its_step_alone(tmp_path: Path) -> None:
    texts = ("skip_collective@step=2", "other_shape@step=3")
    one, group = injector(tmp_path, *texts), Group()
    faulty = wrap_group(group, one)
    for step in (1, 2, 3, 4):
        one.before_step(step)
        faulty.all_reduce(torch.zeros(5))
    assert group.told == [(5,), (10,), (5,)]


class Engine:
    """Its state, and which micro-batches it was given."""

    def __init__(self) -> None:
        self.copies = [torch.ones(3)]
        self.given: list[Any] = []

    def replicated(self) -> tuple[int, list[torch.Tensor]]:
        return 0, self.copies

    def accumulate(self, works: Sequence[Any]) -> str:
        self.given.append(list(works))
        return "sums"


class Inside:
    """What an engine's modules are told to do."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def begin(self, disturbances: Iterable[Disturbance | None]) -> None:
        self.begun.append([one is not None for one in disturbances])


def test_an_engine_gets_its_bits_flipped_and_its_micro_batches_disturbed(tmp_path: Path) -> None:
    engine, inside = Engine(), Inside()
    one = injector(tmp_path, "flip_bit@step=2", "poison@samples=5")
    faulty: Any = wrap_engine(engine, one, cast(MicroBatchFaults, inside))
    works = [SimpleNamespace(batch=SimpleNamespace(positions=p)) for p in [(1, 2), (5, None)]]
    for step in (1, 2):
        one.before_step(step)
        is_sound = torch.equal(engine.copies[0], torch.ones(3))
        assert faulty.accumulate(works) == "sums"
        assert is_sound
    assert not torch.equal(engine.copies[0], torch.ones(3))
    assert engine.given == [works, works]
    assert inside.begun == [[False, True]] * 2
    assert faulty.copies is engine.copies


def test_the_probe_sees_what_is_done_to_a_gradient() -> None:
    """Its hook is on the embedding first; a frozen embedding has a gradient there as well."""
    embedding = torch.nn.Embedding(3, 2)
    embedding.requires_grad_(False)
    seen: list[float] = []

    def probe(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        output.requires_grad_()
        output.register_hook(lambda grad: seen.append(grad.sum().item()))
        return output

    embedding.register_forward_hook(probe)
    inside = MicroBatchFaults()
    model = torch.nn.Sequential(embedding)
    inside.attach(model, embedding)
    reached: list[str] = []
    inside.begin(
        [
            None,
            Disturbance(
                nan_grad=True,
                in_forward=lambda: reached.append("forward"),
                in_backward=lambda: reached.append("backward"),
            ),
            Disturbance(loss_scale=(3.0,), activation_scale=(2.0,)),
        ]
    )
    tokens = torch.tensor([[0, 1]])
    losses = []
    for _ in range(4):  # the last as in an evaluation: nothing is due any more
        sums = model(tokens).sum((1, 2))
        loss, _, _ = inside((sums, sums, sums))
        loss.sum().backward()
        losses.append(loss.item())
    assert losses[1:] == pytest.approx([losses[0], 6 * losses[0], losses[0]])
    assert math.isnan(seen[1]) and [seen[0], *seen[2:]] == [4.0, 24.0, 4.0]
    assert reached == ["forward", "backward"]


def test_a_gradient_that_is_not_contiguous_is_flipped() -> None:
    """As a GRU's is that takes batches first."""
    inside = MicroBatchFaults()
    inside._now = Disturbance(flip_grad=True)
    tokens = torch.ones(3, 2, requires_grad=True)
    output = inside._at_embedding(torch.nn.Identity(), (), tokens)
    output.backward(torch.ones(2, 3).t())
    assert (tokens.grad.abs() > 1e30).sum() == 1 and (tokens.grad == 1).sum() == 5

"""Models from elsewhere on the engines, in one process: their weights, their losses, the gate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.config.compose import compose
from runner.config.schema import RunConfig
from runner.data.feed import MicroBatch
from runner.distributed.env import place_from
from runner.engine.protocol import Engine, MicroStep
from runner.model.blueprint import GuestBlueprint
from runner.model.recorded import record
from runner.session import parts
from runner.session.corpus import open_dataset
from runner.system.error import ConfigError
from tests import guests, warm

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
ALONE = place_from({})
VOCAB, LENGTH, ROWS = 16, 8, 4
SETTINGS = ("data=synthetic", f"data.vocab_size={VOCAB}", f"data.seq_len={LENGTH}")
HEAVY = pytest.mark.full  # transformers takes seconds to import
MODELS = [
    "Tied",
    "Recurrent",
    "Convolved",
    "Seeing",
    "Preferring",
    *(pytest.param(name, marks=HEAVY) for name in ("llama", "gpt2", "lora")),
]


def settings(target: str, *more: str) -> RunConfig:
    told = (f"model._target_=tests.guests.{target}", "compute.precision=fp32", *more)
    return compose([*SETTINGS, *told])


def blueprint(target: str, *more: str) -> GuestBlueprint:
    config = settings(target, *more)
    made = parts.blueprint(config, open_dataset(config))
    assert isinstance(made, GuestBlueprint)
    return made


def build(target: str, *more: str) -> Engine:
    return parts.engine(settings(target, *more), blueprint(target, *more), ALONE, CPU)


def batch(target: str, rows: Sequence[int | None] = range(ROWS)) -> MicroBatch:
    """Some of a few samples as the model wants them; None is padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
    other = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
    images = torch.randn(ROWS, 1, 9, 9, generator=generator)
    fields = {
        "Seeing": {"image": images, "kind": torch.arange(ROWS) % 3},
        "Residual": {"image": images, "kind": torch.arange(ROWS) % 3},
        "Preferring": {"chosen": ids, "rejected": other},
    }.get(target)
    at = [0 if row is None else row for row in rows]
    real = torch.tensor([row is not None for row in rows])
    if fields is None:
        labels = ids[at, 1:].clone()
        labels[~real] = -100
        tokens = ids[at, :-1]
    else:
        fields = {name: tensor[at] for name, tensor in fields.items()}
        tokens = labels = ids[at, :0]
    return MicroBatch(
        tokens=tokens,
        targets=labels,
        segments=None,
        positions=tuple(rows),
        fields=fields,
        real=None if fields is None else real,
    )


def step(engine: Engine, *batches: MicroBatch, skip: bool = False, seed: int = 0) -> Any:
    sums = engine.accumulate([MicroStep(batch=one, seed=seed + n) for n, one in enumerate(batches)])
    scale = torch.tensor(float(sums.count))
    engine.apply(skip=torch.tensor(float(skip)), grad_scale=scale, learning_rate=0.01)
    return sums


def state(engine: Engine) -> dict[str, Tensor]:
    return {shard.name: shard.local.clone() for shard in engine.shards()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("target", MODELS)
def test_a_gated_step_leaves_no_trace_and_a_loaded_state_goes_on_alike(target: str) -> None:
    whole = batch(target)
    engine = build(target)
    first = step(engine, whole)
    before = state(engine)
    poisoned = step(engine, whole, skip=True, seed=7)
    assert same(before, state(engine)) and poisoned.nonfinite == 0
    counts = engine.update_counts()
    assert set(counts.values()) == {1}
    other = build(target, "parallel=ddp")
    for shard in other.shards():
        shard.local.copy_(before[shard.name])
    other.finish_load(counts)
    for seed in range(20):
        here, there = step(engine, whole, seed=seed), step(other, whole, seed=seed)
        assert here.loss == there.loss
    assert same(state(engine), state(other))
    assert here.loss < first.loss


@pytest.mark.parametrize("target", ["Tied", "Seeing", "Preferring"])
def test_halves_add_up_and_padding_adds_nothing(target: str) -> None:
    whole = step(build(target), batch(target))
    halves = step(build(target), batch(target, [0, 1]), batch(target, [2, 3, None]))
    assert whole.count == halves.count
    torch.testing.assert_close(whole.loss, halves.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(whole.grad_square, halves.grad_square, rtol=1e-4, atol=0)


@pytest.mark.parametrize("target", ["Tied", "Seeing", "Preferring", "Recurrent"])
def test_who_is_not_finite_is_known_by_the_sample(target: str) -> None:
    faults = ("parallel=single", "model.hidden=12" if target == "Tied" else "seed=0")
    config = settings(target, *faults, "faults=[poison@samples=2]")
    from runner.fault.inject import FaultInjector
    from runner.fault.spec import parse_faults

    injector = FaultInjector(parse_faults(config.faults), rank=0, markers=Path("/nowhere"))
    engine = parts.engine(config, blueprint(target, *faults), ALONE, CPU, injector)
    sums = step(engine, batch(target), skip=True)
    told = sums.sequences.to_host()
    assert sums.nonfinite == 1
    finite = [torch.tensor(loss).isfinite().item() for loss in told.losses]
    assert finite == [True, True, False, True]
    assert step(engine, batch(target, [0, 1]), skip=True).nonfinite == 0


def test_weights_are_the_constructors_and_depend_on_seed_and_name_alone() -> None:
    made = blueprint("Tied")
    shapes = {name: one.shape for name, one in made.parameters().items()}
    assert "head.weight" not in shapes, "it is the embedding"
    whole = {n: made.initial(0, n, s, 0, torch.Size(s).numel()) for n, s in shapes.items()}
    assert whole["positions"].std() == pytest.approx(0.02, rel=0.2)
    assert whole["embedding.weight"].std() == pytest.approx(0.02, rel=0.2)
    assert not torch.equal(whole["layers.0.weight"], whole["layers.1.weight"])
    again = blueprint("Tied")
    for name, shape in reversed(shapes.items()):
        third = torch.Size(shape).numel() // 3
        torch.testing.assert_close(
            again.initial(0, name, shape, third, third), whole[name][third : 2 * third]
        )
    assert not torch.equal(
        again.initial(1, "positions", shapes["positions"], 0, 8), whole["positions"][:8]
    )


def signature() -> str:
    return record(lambda: guests.Tied(16, 8)).signature()


def test_another_process_builds_the_same() -> None:
    told = warm.finished([sys.executable, "-m", "tests.mechanism.test_guest_model"], timeout=60)
    assert told.stdout.strip() == signature()


def test_what_is_neither_parameter_nor_saved_is_made_as_well() -> None:
    made = blueprint("Tied")
    network = made.on_meta()
    network.to_empty(device="cpu")
    made.finish(network, CPU)
    assert torch.equal(network.scale, torch.linspace(0.5, 1.5, 16))
    assert torch.equal(network.constant, torch.full((16,), 2.0))


class Various(nn.Module):
    """Ways of making tensors that constructors have."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = nn.Linear(6, 6)
        nn.init.orthogonal_(self.drawn.weight)
        with torch.no_grad():
            self.drawn.weight[0] = 7.0
            self.drawn.bias.copy_(torch.arange(6))
        self.factors = nn.Parameter(torch.rand(3, 4) * torch.arange(4) + 1)
        self.attention = nn.MultiheadAttention(6, 2)
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)), persistent=False)
        self.table = torch.tensor([3.0, 1.0])


def test_a_recorded_constructor_is_repeated_tensor_by_tensor() -> None:
    made = record(Various)
    network = made.network
    assert all(tensor.is_meta for tensor in network.parameters())
    weight = made.made(network.drawn.weight, "a")
    assert torch.equal(weight[0], torch.full((6,), 7.0))
    rest = weight[1:] @ weight[1:].T
    torch.testing.assert_close(rest, torch.eye(5), atol=1e-5, rtol=0)
    assert torch.equal(made.made(network.drawn.bias, "b"), torch.arange(6.0))
    assert torch.equal(made.made(network.factors, "c")[:, 0], torch.ones(3))
    assert torch.equal(made.made(network.mask, "d"), torch.tril(torch.ones(3, 3)))
    assert torch.equal(made.made(network.table, "e"), torch.tensor([3.0, 1.0]))
    assert torch.equal(made.made(network.factors, "c"), made.made(network.factors, "c"))
    assert record(Various).signature() == made.signature()


def test_a_constructor_that_needs_values_is_run_in_memory() -> None:
    made = blueprint("Looking")
    assert "DataDependent" in made.twin.why
    one = step(build("Looking"), batch("Looking"))
    assert one.loss == step(build("Looking"), batch("Looking")).loss


def test_sizes_of_the_decoder_are_arguments_beside_a_target(tmp_path: Path) -> None:
    config = settings("Tied", "model.layers=3", "+model.hidden=4")
    assert config.model.arguments == {"layers": 3, "hidden": 4} and config.model.layers == 4
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: tests.guests.Tied\nlayers: 5\n")
    config = compose([*SETTINGS, "model=mine", "model.hidden=6"], config_dir=str(tmp_path))
    assert config.model._target_ == "tests.guests.Tied"
    assert config.model.arguments == {"layers": 5, "hidden": 6}


@pytest.mark.parametrize(
    ("target", "more", "words"),
    [
        ("Missing", "", "has no 'Missing'"),
        ("Tied", "model.hiden=3", "unexpected keyword argument 'hiden'; it takes (vocab_size"),
        ("nothing", "", "gives str; it must give a torch.nn.Module"),
        ("Tied", "compute.frozen=[nowhere]", "'nowhere' is found in no parameter's name"),
        ("Tied", "data.isolate_documents=true", "takes no segments"),
        ("Misshapen", "", "gives [4]; it must give logits [B, T, V], and labels are [4, 8]"),
    ],
)
def test_what_cannot_be_built_or_computed_is_told_in_words(
    target: str, more: str, words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        step(build(target, *([more] if more else [])), batch(target))
    assert words in str(error.value)


@pytest.mark.parametrize("target", ["Tied", "Seeing"])
def test_buffers_in_fp32_go_with_weights_in_bf16(target: str) -> None:
    exact = step(build(target), batch(target)).loss
    rounded = step(build(target, "compute.precision=bf16"), batch(target)).loss
    assert exact != rounded
    torch.testing.assert_close(rounded, exact, rtol=0.02, atol=0)


def test_only_some_parameters_are_trained() -> None:
    engine = build("Tied", "compute.frozen=[layers]")
    before = state(engine)
    assert "exp_avg/layers.0.weight" not in before and "exp_avg/positions" in before
    step(engine, batch("Tied"))
    after = state(engine)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "param/positions" in changed and "param/layers.0.weight" not in changed


@pytest.mark.parametrize("target", ["Tied", "Recurrent", pytest.param("llama", marks=HEAVY)])
def test_its_flops_are_counted_without_values(target: str) -> None:
    """Six for each multiplied weight and token, and what attention adds."""
    network = blueprint(target)
    weights = {n: p for n, p in network.twin.network.named_parameters() if p.dim() == 2}
    multiplied = sum(p.numel() for n, p in weights.items() if "embed" not in n and "posit" not in n)
    if target == "Tied":  # its head is the embedding
        multiplied += network.twin.network.get_parameter("embedding.weight").numel()
    assert 6 * multiplied <= network.flops_per_token() <= 12 * multiplied


if __name__ == "__main__":
    print(signature())

"""Networks of many makes on the engines, in one process (tests/uncommon_guests.py)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from runner.config.compose import compose
from runner.config.schema import RunConfig
from runner.data.feed import few
from runner.distributed.env import place_from
from runner.engine.protocol import Engine, MicroStep
from runner.model.blueprint import GuestBlueprint
from runner.model.loss import HeadLosses
from runner.model.objective import GuestObjective, head_of
from runner.session import parts
from runner.session.corpus import open_dataset
from runner.startup.checks import _differing, samples_alone, works_of
from runner.system.error import ConfigError
from tests import guests, uncommon_guests

pytestmark = pytest.mark.usefixtures("alone")

CPU, ALONE, VOCAB = torch.device("cpu"), place_from({}), 50
TOKENS = "data._target_=tests.uncommon_guests.Tokens"
NAME = "model.name=null"
PAIRS = ("data._target_=tests.guests.Pairs", "model.vocab_size=16")


def built(target: str, *more: str) -> tuple[RunConfig, GuestBlueprint, Engine, list[MicroStep]]:
    own = () if any(word.startswith("data._target_") for word in more) else (TOKENS,)
    kind = f"model._target_=tests.uncommon_guests.{target}"
    config = compose(["data.seq_len=8", "compute.precision=fp32", kind, *own, *more])
    dataset = open_dataset(config)
    network = parts.blueprint(config, dataset)
    assert isinstance(network, GuestBlueprint)
    engine = parts.engine(config, network, ALONE, CPU)
    return config, network, engine, works_of(few(dataset, 8, 2), 1, CPU)


def losses(engine: Engine, works: list[MicroStep], steps: int = 6) -> list[float]:
    result = []
    for _ in range(steps):
        sums = engine.accumulate(works)
        scale = sums.count.float()
        engine.apply(skip=torch.zeros(()), grad_scale=scale, learning_rate=0.02)
        result.append(float(sums.loss / sums.count))
    return result


@pytest.mark.parametrize(
    ("target", "more"),
    [
        ("Scan", ()),  # vocab_size by position alone
        ("OddShapes", ()),
        ("Strided", ()),
        ("TiedBuffered", ("compute.precision=bf16",)),  # norms in BF16 on FP32 buffers
        ("Repeated", ()),  # a dict with logits
        ("Remembering", ()),  # a tuple that begins with logits
        (
            "Configured",
            ("model.layers=[{bias: true},{bias: false}]", *("model.head={bias: false}", NAME)),
        ),
    ],
)
def test_it_learns(target: str, more: tuple[str, ...]) -> None:
    _, _, engine, works = built(target, *more)
    first, *_, last = losses(engine, works)
    assert last < 0.95 * first


def test_a_scalar_stays_one_outside_of_the_engine() -> None:
    _, network, engine, _ = built("OddShapes")
    shards = {shard.name: shard for shard in engine.shards()}
    assert network.parameters()["scale"].shape == shards["exp_avg/scale"].shape == ()
    assert engine.full("param/scale").shape == () and engine.full("param/scale") == 2.0


def test_what_a_constructor_draws_from_its_own_generator_is_as_it_drew_it() -> None:
    _, network, _, _ = built("Configured", NAME)
    assert "a generator of its own" in network.twin.why
    torch.random.manual_seed(0)
    own = uncommon_guests.Configured(16, name=None)
    assert torch.equal(network.initial(0, "gain", [8], 0, 8), own.gain)
    assert network.signature() == network.again().signature()


def test_a_constructor_may_end_in_another_dtype() -> None:
    _, network, _, _ = built("Halved")
    assert not network.twin.why
    assert network.twin.network.get_parameter("head.weight").dtype is torch.float16
    assert network.initial(0, "head.weight", [16, 8], 0, 8).dtype is torch.float32


@pytest.mark.parametrize(
    ("target", "more", "words"),
    [
        ("Complex", (), "filter is torch.complex64; only floating-point ones"),
        ("OddShapes", ("model.none=true",), "none of shape [0, 4] has no elements"),
        ("Sparse", (), "sparse=True; sparse gradients cannot be reduced"),
        ("Lazy", (), "head is a LazyLinear, whose weights have no shape"),
    ],
)
def test_what_cannot_be_trained_is_refused(target: str, more: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        built(target, *more)
    assert words in str(error.value)


def test_samples_that_change_each_others_loss_are_told() -> None:
    [check] = samples_alone(*built("Matching", *PAIRS)[2:])
    assert check.holds is False and "trains another objective" in check.found
    [check] = samples_alone(*built("Scan")[2:])
    assert check.holds


def test_calls_that_differ_are_found_by_number_and_by_shape() -> None:
    one, other = [("a", "[1]"), ("b", "[2]")], [("a", "[1]"), ("b", "[3]")]
    assert _differing([one, other], has_shapes=True) == {"b"}
    assert not _differing([one, other], has_shapes=False)
    assert _differing([one, other[:1]], has_shapes=False) == {"b"}


class Capped(uncommon_guests.Strided):
    """Does something with its logits."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return torch.tanh(super().forward(input_ids) / 5) * 5


def gradients(network: nn.Module, most: int) -> tuple[Tensor, Tensor, GuestObjective]:
    losses = HeadLosses(fp32=True, z_loss=0.0, most_bytes=most)
    objective = GuestObjective(network, head_losses=losses, dtype=None, vocab_size=VOCAB)
    ids = torch.randint(VOCAB, (3, 13), generator=torch.Generator().manual_seed(1))
    loss, *_ = objective({"input_ids": ids[:, :-1], "labels": ids[:, 1:]})
    loss.sum().backward()  # type: ignore[no-untyped-call]
    grads = [p.grad.flatten() for p in network.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(grads), objective


@pytest.mark.parametrize("kind", [uncommon_guests.Strided, guests.Tied, Capped])
def test_large_logits_are_made_in_parts_and_change_nothing(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    network = guests.Tied(VOCAB, 12) if kind is guests.Tied else kind(VOCAB)
    taken = []
    parts_of = HeadLosses.__call__
    monkeypatch.setattr(
        HeadLosses, "__call__", lambda *args, **more: taken.append(1) or parts_of(*args, **more)
    )
    whole, whole_grads, _ = gradients(copy.deepcopy(network), most=0)
    loss, grads, _ = gradients(copy.deepcopy(network), most=600)
    assert len(taken) == (kind is not Capped)  # those are needed whole
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(grads, whole_grads, rtol=1e-5, atol=1e-6)


def test_logits_that_no_known_layer_makes_are_told() -> None:
    _, _, objective = gradients(uncommon_guests.Repeated(VOCAB), most=600)
    assert objective.logits_bytes == 0
    network = uncommon_guests.Normalised(VOCAB)
    network.head = nn.Sequential(network.head, nn.Identity())
    network.extra = nn.Linear(1, VOCAB)  # a second candidate
    _, _, objective = gradients(network, most=600)
    assert objective.logits_bytes == 4 * 12 * VOCAB


def test_a_layer_in_a_unit_that_is_gathered_alone_is_left_as_it_is() -> None:
    network = uncommon_guests.Strided(VOCAB)
    assert head_of(network, VOCAB) is network.head
    assert head_of(network, VOCAB, [nn.ModuleList([network.head])]) is None

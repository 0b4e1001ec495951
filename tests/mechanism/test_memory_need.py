"""What a run is said to take of memory is what is allocated."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.command.plan_memory import planned_memory
from runner.data.feed import few
from runner.engine.fsdp import FsdpEngine
from runner.engine.protocol import MicroStep, Shard
from runner.model.decoder import Decoder, DecoderShape
from runner.model.loss import HeadLosses
from runner.session.corpus import open_dataset
from runner.startup.memory_need import (
    EngineFacts,
    MemoryNeed,
    SavedActivations,
    engine_facts,
    memory_need,
)
from tests.mechanism.test_guest_model import ALONE, batch, blueprint, build, settings

pytestmark = pytest.mark.usefixtures("alone")

SHAPE = DecoderShape(vocab_size=32, dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=64, seq_len=24)


def storages(tensors: list[Tensor]) -> int:
    """Bytes, each storage once."""
    held = [tensor.untyped_storage() for tensor in tensors]
    return sum({one.data_ptr(): one.nbytes() for one in held}.values())


def configured(model: str) -> EngineFacts:
    config = settings(model)
    return engine_facts(config.parallel, config.compute, ALONE)


@pytest.mark.parametrize(
    "optim", ["optim=adamw", "optim=lion", "optim._target_=tests.optimizers.EightBit"]
)
def test_weights_gradients_and_moments_are_those_that_are_there(optim: str) -> None:
    engine = build("Tied", optim)
    assert isinstance(engine, FsdpEngine)
    with SavedActivations() as saved:
        engine.accumulate([MicroStep(batch=batch("Tied"), seed=0)])
    need = memory_need(
        engine.shards(),
        blueprint("Tied").parameters(),
        configured("Tied"),
        activations=saved.num_bytes,
        samples=4,
        snapshots=0,
    )
    held = list(engine._params.values())
    assert need.weights == storages(held)
    assert need.gradients == storages([one.grad for one in held if one.grad is not None])
    one = torch.ones(())
    engine.apply(skip=torch.zeros(()), grad_scale=one, learning_rate=0.01)
    kept = engine._optimizer.tensors() | engine._optimizer.uncut()
    assert need.optimizer == storages(list(kept.values()))
    assert need.gathered == 4 * sum(p.numel() for p in engine._params.values())
    assert need.activations and need.fitting(need.fixed + 10 * need.activations) == 40


@pytest.mark.parametrize(
    ("model", "optim"),
    [
        ("Tied", "optim=adamw"),
        ("llama", "optim=lion"),
        ("Convolved", "optim=muon"),
        ("Tied", "optim._target_=tests.optimizers.EightBit"),
    ],
)
def test_a_plan_says_what_a_run_is_seen_to_need(model: str, optim: str) -> None:
    """Counted on the meta device, and from an engine that has computed a micro-batch."""
    network = blueprint(model)
    config = settings(model, optim, "batch.micro_size=4")
    dataset = open_dataset(config)
    few_samples = few(dataset, config.data.seq_len, 4)
    planned = planned_memory(config, network, dataset, ALONE)
    engine = build(model, optim)
    with SavedActivations() as saved:
        engine.accumulate([MicroStep(batch=few_samples, seed=0)])
    seen = memory_need(
        engine.shards(),
        network.parameters(),
        configured(model),
        activations=saved.num_bytes,
        samples=4,
        snapshots=0,
    )
    assert not planned.unknown
    assert replace(planned.need, activations=0, snapshots=0) == replace(seen, activations=0)
    assert planned.need.activations == pytest.approx(saved.num_bytes, rel=0.1)


def test_activations_are_what_backward_needs() -> None:
    """Held against autograd's own graph: everything that its nodes have saved."""
    torch.manual_seed(0)
    decoder = Decoder(SHAPE)
    tokens = torch.arange(48).view(2, 24) % 32
    with SavedActivations() as saved:
        logits = decoder(tokens)
    seen: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    nodes, known = [logits.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in known:
            continue
        known.add(node)
        nodes += [before for before, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                for one in value if isinstance(value, tuple | list) else [value]:
                    if isinstance(one, Tensor):
                        storage = one.untyped_storage()
                        seen[storage.data_ptr()] = storage.nbytes()
    expected = sum(size for place, size in seen.items() if place not in weights)
    assert saved.num_bytes == expected > 0


def facts(**more: bool | int) -> EngineFacts:
    told: dict[str, bool | int] = {
        "zero_stage": 0,
        "item_bytes": 2,
        "is_sharded": True,
        "reshards": True,
        "keeps_whole_gradients": False,
    }
    return EngineFacts(**(told | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("of", "gradients", "gathered"),
    [
        (facts(), 4 * 90, 2 * (20 + 2 * 80)),
        (facts(reshards=False), 4 * 90, 2 * 180),
        (facts(is_sharded=False, item_bytes=4), 4 * 90, 4 * 180),
        (facts(keeps_whole_gradients=True), 4 * (90 + 180), 2 * 180),
        (facts(zero_stage=1), 4 * 180, 2 * 180),
        (facts(zero_stage=2), 4 * 90, 2 * 180),
        (facts(zero_stage=3), 4 * 90, 2 * (90 + 180)),
    ],
)
def test_engines_differ_in_what_they_gather(of: EngineFacts, gradients: int, gathered: int) -> None:
    """Two ranks, of which this one has a half of everything."""
    sizes = {"embedding.weight": 20, "blocks.0.weight": 80, "blocks.1.weight": 80}
    shards = [
        Shard(name=f"{kind}/{name}", shape=(size,), start=0, local=torch.zeros(size // 2))
        for name, size in sizes.items()
        for kind in ("param", "exp_avg", "exp_avg_sq")
    ]
    parameters = {n: torch.nn.Parameter(torch.empty(size)) for n, size in sizes.items()}
    need = memory_need(shards, parameters, of, activations=None, samples=0, snapshots=0)
    assert (need.weights, need.optimizer) == (4 * 90, 8 * 90)
    assert (need.gradients, need.gathered) == (gradients, gathered)
    assert need.fitting(1 << 40) is None


def test_the_line() -> None:
    need = MemoryNeed(
        weights=1 << 20,
        gradients=1 << 20,
        optimizer=2 << 20,
        gathered=0,
        activations=4 << 20,
        samples=4,
        snapshots=3 << 20,
    )
    assert need.line(1 << 30) == (
        "memory of a rank: weights 1 MiB, gradients 1 MiB, optimizer 2 MiB, gathered weights 0 B, "
        "activations of 4 samples 4 MiB: 8 MiB of 1 GiB, which would hold micro-batches of 1,020; "
        "snapshots 3 MiB"
    )


class _Live(TorchDispatchMode):
    """Bytes of all storages that are alive, at most; without memory behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for one in tree_leaves(outputs):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in self._seen:
                self._add(one.untyped_storage())
        return outputs

    def _add(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        self._seen.add(place)
        self._live += size
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._gone, place, size)

    def _gone(self, place: int, size: int) -> None:
        self._seen.discard(place)
        self._live -= size


def peak_of_loss(vocab_size: int, num_tokens: int, most_bytes: int) -> int:
    """Bytes at the most in a loss of a bias-free head and its backward, BF16, dim 64."""
    head = HeadLosses(fp32=True, z_loss=0.0, most_bytes=most_bytes)
    meta: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    hidden, weight = torch.empty(1, num_tokens, 64, **meta), torch.empty(vocab_size, 64, **meta)
    targets = torch.empty(1, num_tokens, dtype=torch.int64, device="meta")
    with _Live() as live:
        head(hidden, weight, targets)[1].sum().backward()
    return live.peak


def test_the_memory_of_a_loss_does_not_grow_with_tokens_times_vocabulary() -> None:
    """At Llama 3's vocabulary; whole FP32 logits would be 4 GiB for 8,192 tokens."""
    vocab_size, num_tokens, most = 128_256, 8_192, 256 << 20
    peak = peak_of_loss(vocab_size, num_tokens, most)
    assert most < peak < vocab_size * num_tokens  # a quarter of whole FP32 logits
    # What is left to grow: hidden states and their gradients, and the weight's gradient.
    linear = 16 * 64 * (vocab_size + num_tokens)
    for more_words, more_tokens in ((2, 1), (1, 2), (4, 4)):
        grown = peak_of_loss(more_words * vocab_size, more_tokens * num_tokens, most)
        assert grown - peak < linear * max(more_words, more_tokens), (more_words, more_tokens)
    whole = 4 * vocab_size * num_tokens
    assert peak_of_loss(vocab_size, num_tokens, 1 << 62) > 2 * whole

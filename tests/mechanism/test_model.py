"""The network, its initial weights and its loss, in one process on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.flop_counter import FlopCounterMode

from runner.config.schema import ModelConfig
from runner.model.blueprint import BLOCK_ELEMENTS, freeze, initial_range, initial_std
from runner.model.decoder import (
    Decoder,
    DecoderShape,
    default_ffn_dim,
    flops_per_token,
    num_parameters,
)
from runner.model.loss import NOT_COUNTED, HeadLosses, sequence_losses
from runner.model.objective import DecoderObjective
from runner.system.error import ConfigError
from tests.mechanism.weights import set_initial_weights

PRESETS = sorted((Path(__file__).parents[2] / "configs" / "model").glob("*.yaml"))
SHAPE = DecoderShape(
    vocab_size=61, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64, seq_len=32, init_std=0.2
)
VARIANTS = [
    SHAPE,
    replace(SHAPE, kv_heads=4, tied_head=False),
    replace(SHAPE, kv_heads=1, qk_norm=True),
]


def build(shape: DecoderShape, *, seed: int = 0) -> Decoder:
    decoder = Decoder(shape)
    set_initial_weights(decoder, seed=seed)
    return decoder


def random_tokens(*size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SHAPE.vocab_size, size, generator=generator)


def read_shape(preset: Path) -> DecoderShape:
    tree = OmegaConf.load(preset)
    merged = OmegaConf.merge(OmegaConf.structured(ModelConfig), tree.get("model", tree))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, ModelConfig)
    return DecoderShape(
        vocab_size=config.vocab_size or 257,
        dim=config.dim,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads or config.heads,
        ffn_dim=config.ffn_dim or default_ffn_dim(config.dim),
        seq_len=64,
        tied_head=config.tied_head,
        qk_norm=config.qk_norm,
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        dropout=config.dropout,
        init_std=config.init_std,
    )


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/peers", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


# The network


@pytest.mark.parametrize("shape", VARIANTS)
def test_a_later_token_changes_no_earlier_logit(shape: DecoderShape) -> None:
    decoder = build(shape)
    tokens = random_tokens(2, 16)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % shape.vocab_size
    before, after = decoder(tokens), decoder(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=0)
    assert not torch.equal(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("shape", VARIANTS)
def test_documents_do_not_see_each_other(shape: DecoderShape) -> None:
    decoder = build(shape)
    tokens = random_tokens(2, 16)
    segments = torch.tensor([0] * 7 + [1] * 9, dtype=torch.int32).expand(2, -1)
    changed = tokens.clone()
    changed[:, :7] = random_tokens(2, 7, seed=1)
    second = decoder(tokens, segments)[:, 7:]
    assert torch.equal(second, decoder(changed, segments)[:, 7:])
    torch.testing.assert_close(second, decoder(tokens[:, 7:]), rtol=1e-4, atol=1e-5)


def test_one_segment_is_plain_causal_attention() -> None:
    decoder = build(SHAPE)
    tokens = random_tokens(2, 16)
    segments = torch.zeros(2, 16, dtype=torch.int32)
    torch.testing.assert_close(decoder(tokens, segments), decoder(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputing_blocks_changes_no_bit(dropout: float) -> None:
    def gradients(recompute: str) -> list[Tensor]:
        decoder = build(replace(SHAPE, dropout=dropout, recompute=recompute))
        torch.manual_seed(7)
        torch.autograd.backward(decoder(random_tokens(2, 16)).square().mean())
        return [parameter.grad for parameter in decoder.parameters() if parameter.grad is not None]

    plain, recomputed = gradients("none"), gradients("blocks")
    assert len(plain) == len(recomputed) == len(list(Decoder(SHAPE).parameters()))
    assert all(map(torch.equal, plain, recomputed))


def test_dropout_is_off_in_evaluation() -> None:
    decoder = build(replace(SHAPE, dropout=0.5)).eval()
    tokens = random_tokens(2, 16)
    assert torch.equal(decoder(tokens), build(SHAPE)(tokens))


@pytest.mark.parametrize("shape", VARIANTS)
@pytest.mark.parametrize("resets", [True, False], ids=["", "without reset_buffers"])
def test_meta_then_to_empty_equals_direct(shape: DecoderShape, resets: bool) -> None:
    with torch.device("meta"):
        decoder = Decoder(shape)
    decoder.to_empty(device="cpu")
    if resets:
        decoder.reset_buffers()
    set_initial_weights(decoder, seed=3)
    tokens = random_tokens(2, 16)
    assert torch.equal(decoder(tokens), build(shape, seed=3)(tokens))


@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_fsdp_mixed_precision_equals_bf16_parameters(mesh: DeviceMesh, recompute: str) -> None:
    shape = replace(SHAPE, seq_len=600, recompute=recompute)
    sharded, plain = build(shape), build(shape).to(torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (*sharded.blocks, sharded):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    tokens = random_tokens(1, 600)
    segments = (torch.arange(600, dtype=torch.int32) // 500).unsqueeze(0)
    logits = sharded(tokens, segments)
    assert torch.equal(logits, plain(tokens, segments))
    torch.autograd.backward(logits.float().square().mean())
    assert all(parameter.grad is not None for parameter in sharded.parameters())


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"33 tokens .* data\.seq_len=32"):
        build(SHAPE)(random_tokens(1, 33))


# Its size


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_presets_build_and_are_counted(preset: Path) -> None:
    shape = read_shape(preset)
    with torch.device("meta"):
        decoder = Decoder(shape)
    assert not list(decoder.buffers())
    for name, _ in decoder.named_parameters():
        initial_std(name, shape)


@pytest.mark.parametrize(
    ("preset", "vocab_size", "millions"),
    [("small", 50_257, 124), ("llama_1b", 128_256, 1_236), ("llama_8b", 128_256, 8_030)],
)
def test_presets_have_the_published_size(preset: str, vocab_size: int, millions: int) -> None:
    path = next(path for path in PRESETS if path.stem == preset)
    shape = replace(read_shape(path), vocab_size=vocab_size)
    assert round(num_parameters(shape) / 1e6) == millions


@pytest.mark.parametrize(("dim", "ffn_dim"), [(24, 64), (25, 128), (128, 384), (768, 2048)])
def test_default_ffn_dim(dim: int, ffn_dim: int) -> None:
    assert default_ffn_dim(dim) == ffn_dim


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("frozen", [[], [r"blocks\.0"], ["embedding", "up|query"], ["head|embed"]])
def test_flops_per_token_as_torch_counts_them(tied: bool, frozen: list[str]) -> None:
    """All but attention's own, which torch does not count on a CPU."""
    shape = replace(SHAPE, tied_head=tied)
    if tied:
        frozen = [pattern.replace("head|", "") for pattern in frozen]
    model = Decoder(shape)
    set_initial_weights(model, seed=0)
    freeze(model, frozen)
    # The guard's probe asks for the gradient at the embedding, whatever is trained above it.
    model.embedding.register_forward_hook(
        lambda module, given, made: made if made.requires_grad else made.requires_grad_()
    )
    tokens = torch.zeros((2, shape.seq_len), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    counted = sum(count for kind, count in counts.items() if "attention" not in str(kind))
    attention = 6 * shape.layers * shape.dim * shape.seq_len
    told = flops_per_token(model) - attention
    assert counted == told * tokens.numel()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, r"model\.heads=5 .* model\.dim=32"),
        ({"dim": 36, "heads": 12, "kv_heads": 12}, r"model\.heads=12 .* even .* 3"),
        ({"kv_heads": 3}, r"model\.kv_heads=3 .* model\.heads=4"),
    ],
)
def test_bad_shapes_name_the_key(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SHAPE, **changes)  # type: ignore[arg-type]


# Its initial weights


def part(start: int, count: int, *, name: str = "head.weight", seed: int = 0) -> Tensor:
    return initial_range(name, (3, BLOCK_ELEMENTS), 0.5, seed=seed, start=start, count=count)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_any_partition_gives_the_same_bytes(num_parts: int) -> None:
    total = 3 * BLOCK_ELEMENTS
    cuts = [total * index // num_parts for index in range(num_parts + 1)]
    pieces = [part(low, high - low) for low, high in pairwise(cuts)]
    assert torch.equal(torch.cat(pieces), part(0, total))


@pytest.mark.parametrize(
    ("start", "count"), [(0, 0), (5, 0), (BLOCK_ELEMENTS - 1, 2), (BLOCK_ELEMENTS, 1), (17, 4)]
)
def test_a_small_range_is_a_slice_of_the_whole(start: int, count: int) -> None:
    whole = part(0, 3 * BLOCK_ELEMENTS)
    assert torch.equal(part(start, count), whole[start : start + count])


def test_names_seeds_and_blocks_differ() -> None:
    draws = [
        part(0, 1000),
        part(0, 1000, seed=1),
        part(0, 1000, name="embedding.weight"),
        part(BLOCK_ELEMENTS, 1000),
    ]
    for index, one in enumerate(draws):
        for other in draws[:index]:
            correlation = torch.corrcoef(torch.stack([one, other]))[0, 1]
            assert abs(correlation) < 0.2


def test_initial_values_are_normal() -> None:
    values = part(0, 3 * BLOCK_ELEMENTS)
    assert values.dtype == torch.float32
    assert abs(values.mean()) < 0.005
    assert abs(values.std() - 0.5) < 0.005
    assert abs((values.abs() < 0.5).float().mean() - 0.6827) < 0.005


def test_a_range_outside_the_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"leaves head\.weight"):
        part(3 * BLOCK_ELEMENTS - 1, 2)


def test_rules() -> None:
    shape = replace(SHAPE, layers=8, qk_norm=True, tied_head=False)
    with torch.device("meta"):
        names = [name for name, _ in Decoder(shape).named_parameters()]
    stds = {name: initial_std(name, shape) for name in names}
    assert all((std is None) == ("norm" in name) for name, std in stds.items())
    assert stds["embedding.weight"] == stds["head.weight"] == shape.init_std
    assert stds["blocks.7.attention.query.weight"] == shape.init_std
    assert stds["blocks.7.attention.output.weight"] == shape.init_std / 4
    assert stds["blocks.0.ffn.down.weight"] == shape.init_std / 4
    with pytest.raises(ValueError, match=r"'blocks\.0\.bias'"):
        initial_std("blocks.0.bias", shape)


# Its loss


def random_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits = (3 * torch.randn(3, 5, 11)).requires_grad_()
    targets = torch.randint(11, (3, 5))
    targets[0, 2:] = NOT_COUNTED
    targets[2] = NOT_COUNTED
    return logits, targets


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_tokens_not_counted_add_exactly_nothing(z_loss: float) -> None:
    logits, targets = random_batch()
    cross_entropy, loss = sequence_losses(logits, targets, fp32=True, z_loss=z_loss)
    assert cross_entropy[2] == 0 and loss[2] == 0
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert (gradient[targets == NOT_COUNTED] == 0).all()
    assert (gradient[targets != NOT_COUNTED] != 0).all()


def test_fp32_agrees_with_torch_and_beats_bf16() -> None:
    logits, targets = random_batch()
    rounded = logits.detach().bfloat16()
    exact = F.cross_entropy(rounded.double().view(-1, 11), targets.view(-1), reduction="sum")
    precise, _ = sequence_losses(rounded, targets, fp32=True, z_loss=0.0)
    coarse, _ = sequence_losses(rounded, targets, fp32=False, z_loss=0.0)
    assert precise.dtype == coarse.dtype == torch.float32
    assert precise.shape == (3,)
    torch.testing.assert_close(precise.sum().double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(coarse.sum().double(), exact, rtol=2e-2, atol=0)


def losses_and_grads(
    most_bytes: int, *, z_loss: float, dtype: torch.dtype, shape: DecoderShape = SHAPE
) -> tuple[Tensor, list[Tensor]]:
    """Both losses of each sequence, and all gradients of one step; the head by parts or not."""
    model = Decoder(shape, HeadLosses(fp32=True, z_loss=z_loss, most_bytes=most_bytes))
    set_initial_weights(model, seed=1)
    model.to(dtype)
    model.reset_buffers()
    tokens = torch.randint(61, (3, 21), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    targets[0, 5] = targets[2, 3:] = NOT_COUNTED
    logits = model(tokens[:, :-1], None, targets)
    assert logits.dim() == (2 if most_bytes else 3)
    losses = sequence_losses(logits, targets, fp32=True, z_loss=z_loss)
    (losses[1] * torch.tensor([1.0, 3.0, 0.5])).sum().backward()
    return torch.stack(losses).detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("most_bytes", [61 * 4, 61 * 4 * 7, 61 * 4 * 59])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_parts_gives_the_same_losses_and_gradients(
    most_bytes: int, z_loss: float, tied: bool
) -> None:
    shape = replace(SHAPE, tied_head=tied)
    whole, whole_grads = losses_and_grads(0, z_loss=z_loss, dtype=torch.float32, shape=shape)
    parts, grads = losses_and_grads(most_bytes, z_loss=z_loss, dtype=torch.float32, shape=shape)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=0)
    for one, other in zip(grads, whole_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("most_bytes", [0, 61 * 4 * 7])
def test_an_evaluation_counts_the_likeliest_tokens(most_bytes: int) -> None:
    model = Decoder(SHAPE, HeadLosses(fp32=True, z_loss=0.0, most_bytes=most_bytes))
    set_initial_weights(model, seed=1)
    tokens = torch.randint(61, (3, 20), generator=torch.Generator().manual_seed(0))
    best = model(tokens).argmax(dim=-1)
    labels = torch.where(torch.arange(20) % 4 == 0, (best + 1) % 61, best)
    labels[0, 5] = labels[2, 3:] = NOT_COUNTED
    objective = DecoderObjective(model, fp32=True, z_loss=0.0)
    assert objective({"input_ids": tokens, "labels": labels})[3] == {}, "in training nobody asks"
    with torch.no_grad():
        right, counts = objective({"input_ids": tokens, "labels": labels})[3]["accuracy"]
    assert (right.tolist(), counts.tolist()) == ([14, 15, 2], [19, 20, 3])


def test_a_head_in_parts_is_as_exact_in_bf16_as_at_once() -> None:
    """The gradient of the head is not summed over parts: it is rounded once."""
    _, exact = losses_and_grads(0, z_loss=0.0, dtype=torch.float32)
    _, whole = losses_and_grads(0, z_loss=0.0, dtype=torch.bfloat16)
    _, parts = losses_and_grads(61 * 4 * 7, z_loss=0.0, dtype=torch.bfloat16)

    def error(grads: list[Tensor]) -> float:
        pairs = zip(grads, exact, strict=True)
        return sum((one.float() - other).square().sum().item() for one, other in pairs)

    assert error(parts) < 1.2 * error(whole)


def test_what_does_not_count_is_left_out_of_a_head_in_parts() -> None:
    losses = HeadLosses(fp32=True, z_loss=0.0, most_bytes=8)
    weight = torch.randn(5, 4, requires_grad=True)
    hidden = torch.randn(1, 3, 4)
    hidden[0, 1] = torch.nan
    hidden.requires_grad_()
    told = losses(hidden, weight, torch.tensor([[2, NOT_COUNTED, 4]]))
    told[1].sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None and hidden.grad is not None
    assert told.isfinite().all() and hidden.grad[0, 1].eq(0).all() and hidden.grad.isfinite().all()


def test_small_logits_are_held_at_once() -> None:
    losses = HeadLosses(fp32=True, z_loss=0.0, most_bytes=1 << 20)
    hidden, weight = torch.empty(2, 512, 1, device="meta"), torch.empty(256, 1, device="meta")
    assert not losses.is_wanted(hidden, weight)
    assert losses.is_wanted(hidden, torch.empty(257, 1, device="meta"))

"""What one process shows on a GPU: sums, heads in parts, and waiting that keeps no core busy."""

from __future__ import annotations

import time

import pytest
import torch

from runner.checkpoint.tensor_sums import Summing
from runner.health.rank_checks import checksum
from runner.model.loss import HeadLosses, sequence_losses
from runner.train.agreed_step import HostNumbers


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_is_the_cpus(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    copy = [torch.randn(size, generator=generator).to(dtype) for size in (1, 1000, 1 << 20)]
    assert checksum([tensor.cuda() for tensor in copy]) == checksum(copy)


@pytest.mark.gpu
def test_the_state_digest_is_the_cpus() -> None:
    values = torch.randn(5_000_011, generator=torch.Generator().manual_seed(0))
    assert Summing().of("param/a", 77, values.cuda()) == Summing().of("param/a", 77, values)


@pytest.mark.gpu
def test_a_large_head_in_parts_gives_the_same_losses_in_less_memory() -> None:
    rows, length, dim, vocabulary = 1, 4096, 1024, 64_000
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, length, dim, generator=generator).to("cuda", torch.bfloat16)
    weight = (torch.randn(vocabulary, dim, generator=generator) * 0.02).to("cuda", torch.bfloat16)
    targets = torch.randint(vocabulary, (rows, length), generator=generator).cuda()
    results = []
    for most_bytes in (0, rows * length * vocabulary // 4):
        losses_of = HeadLosses(fp32=True, z_loss=0.0, most_bytes=most_bytes)
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        is_wanted = losses_of.is_wanted(x, w)
        logits = losses_of(x, w, targets) if is_wanted else torch.nn.functional.linear(x, w)
        losses, _ = sequence_losses(logits, targets, fp32=True, z_loss=0.0)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None and w.grad is not None
        results.append((losses.detach(), x.grad, w.grad, torch.cuda.max_memory_allocated()))
        del logits, losses, x, w
    (loss, *grads, whole), (parts, *part_grads, peak) = results
    torch.testing.assert_close(parts, loss, rtol=1e-4, atol=0.0)
    for part, grad in zip(part_grads, grads, strict=True):
        assert (part.float() - grad.float()).norm() < 0.02 * grad.float().norm()
    assert peak < 0.7 * whole


@pytest.mark.gpu
def test_waiting_for_a_step_leaves_the_core_to_other_threads() -> None:
    numbers = torch.ones(8, dtype=torch.float64, device="cuda")
    HostNumbers(numbers).read()
    torch.cuda._sleep(2_000_000_000)
    on_their_way = HostNumbers(numbers)
    began, computed = time.monotonic(), time.thread_time()
    on_their_way.read()
    assert time.thread_time() - computed < (time.monotonic() - began) / 2

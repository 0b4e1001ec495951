"""A loop on tensors that lie anyhow: any_layout_script.py OUT SEED UPDATES, also without torchrun.

Each tensor has a mesh of its own, of one to four dimensions, of all ranks or of some, whose twins
hold the same on the others; cut along any dimensions, also by torch's strided shards, unevenly, or
not at all. SEED draws it. Every rank computes the loss of whole tensors on the same batch, so that
weights and gradients are those of one process, bit for bit; some gradients are partial sums.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from runner import Guard, Ring
from runner.checkpoint.state_digest import state_digest
from runner.embed.opening import SingleProcessRanks
from runner.embed.state.loop_state import LoopState
from tests.ranked import ranked

NUM, BAD = 40, (5, 18)
SHAPES = [(7, 5), (3, 4, 6), (2,), (1, 3), (12, 2), (8, 16), (5, 1, 2, 3), (9,), (2, 2, 2), (6, 6)]
BF16, FROZEN = 8, 7  # numbers of tensors
RULES: dict[str, Any] = {"every": 3, "clean_after": 2, "min_history": 8}


def part(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> torch.Tensor:
    """This rank's, cut by one dimension of the mesh after the other."""
    for number, place in enumerate(placements):
        if isinstance(place, Shard | _StridedShard):
            cut, _ = place._split_tensor(
                whole, mesh.size(number), with_padding=False, contiguous=True
            )
            whole = cut[mesh.get_local_rank(number)]
    return whole.clone()


def laid_out(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    own = part(whole, mesh, placements)
    shape = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(own, mesh, placements, run_check=False, **shape)


class Layouts:
    """Draws meshes and placements, the same on all ranks."""

    def __init__(self, seed: int) -> None:
        self._dice, size = random.Random(seed), dist.get_world_size()
        sizes = [
            cut
            for ndim in range(1, 5)
            for cut in itertools.product(range(1, size + 1), repeat=ndim)
            if torch.Size(cut).numel() == size
        ]
        self._meshes = [
            init_device_mesh("cpu", cut, mesh_dim_names=tuple("abcd"[: len(cut)]))
            for cut in self._dice.sample(sizes, min(4, len(sizes)))
        ]

    def draw(self, whole: torch.Tensor) -> tuple[DeviceMesh, list[Placement]]:
        mesh, shape = self._dice.choice(self._meshes), whole.shape
        names = mesh.mesh_dim_names or ()
        kept = [name for name in names if self._dice.random() < 0.7] or list(names)
        mesh = mesh[tuple(kept)] if len(kept) < len(names) else mesh
        if mesh.ndim == 2 and shape[0] % mesh.size() == 0 and self._dice.random() < 0.5:
            return mesh, [_StridedShard(0, split_factor=mesh.size(1)), Shard(0)]
        dims: list[int | None] = [*range(len(shape)), None]
        chosen = [self._dice.choice(dims) for _ in range(mesh.ndim)]
        return mesh, [Replicate() if dim is None else Shard(dim) for dim in chosen]


class Net(nn.Module):
    def __init__(self, seed: int | None) -> None:
        """``seed`` None: plain tensors, of one process."""
        super().__init__()
        generator, self.places = torch.Generator().manual_seed(3), []
        layouts = None if seed is None else Layouts(seed)
        self.weights = nn.ParameterList()
        for number, shape in enumerate(SHAPES):
            whole = torch.randn(shape, generator=generator)
            whole = whole.bfloat16() if number == BF16 else whole
            place = layouts and layouts.draw(whole)
            self.places.append(place)
            held = laid_out(whole, *place) if place else whole
            self.weights.append(nn.Parameter(held, requires_grad=number != FROZEN))

    def backward(self, batch: torch.Tensor) -> torch.Tensor:
        wholes = [
            (w.full_tensor() if isinstance(w, DTensor) else w).detach().contiguous()
            for w in self.weights
        ]
        leaves = [whole.requires_grad_(n != FROZEN) for n, whole in enumerate(wholes)]
        x = [torch.sin(batch.sum() * torch.arange(w.numel()).view(w.shape)) for w in leaves]
        pairs = zip(leaves, x, strict=True)
        loss = torch.stack([(w.float() * of - 0.1).square().mean() for w, of in pairs]).mean()
        loss.backward()
        for weight, leaf, place in zip(self.weights, leaves, self.places, strict=True):
            if leaf.grad is not None:
                weight.grad = _gradient(leaf.grad, *place) if place else leaf.grad
        return loss.detach()


def _gradient(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> torch.Tensor:
    """Summed over two ranks, halves are exact."""
    partial = [
        Partial() if p.is_replicate() and mesh.size(n) == 2 else p for n, p in enumerate(placements)
    ]
    return laid_out(whole / 2 ** sum(p.is_partial() for p in partial), mesh, partial)


def batches(*, poison: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(4, generator=generator) for _ in range(NUM)]
    for number in BAD if poison else ():
        made[number][2] = float("nan")
    return made


def built(seed: int | None) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(seed)
    trained = [weight for weight in net.weights if weight.requires_grad]
    return net, torch.optim.AdamW(trained, lr=1e-2, foreach=False)


def plain(skipped: list[Any], updates: int) -> tuple[str, list[float]]:
    """The loop of one process without a guard: its end, and the norms of its gradients."""
    net, optimizer = built(None)
    norms = []
    for number, batch in enumerate(batches(poison=False)):
        if any(start <= number < stop for start, stop in skipped) or len(norms) == updates:
            continue
        net.backward(batch)
        grads = [weight.grad for weight in net.weights if weight.grad is not None]
        norms.append(float(nn.utils.get_total_norm(grads)))
        optimizer.step()
        optimizer.zero_grad()
    cpu = torch.device("cpu")
    return state_digest(
        LoopState([net], [optimizer], SingleProcessRanks(), cpu).tensors(), {}
    ), norms


def clipped(out: Path, seed: int | None) -> float:
    """How far gradients that the guard clips are from those that torch clips in one process."""
    (net, optimizer), (alone, _) = built(seed), built(None)
    batch = batches(poison=False)[0]
    alone.backward(batch)
    bound = 0.5 * float(nn.utils.get_total_norm([w.grad for w in alone.weights if w.requires_grad]))
    nn.utils.clip_grad_norm_(alone.weights, bound)
    guard = Guard(out / "clip", model=net, optimizer=optimizer, clip=bound)
    for same in guard.over([batch]):
        assert guard.ok(net.backward(same))
        far = [
            (getattr(own.grad, "full_tensor", lambda own=own: own.grad)() - one.grad).norm()
            / one.grad.norm()
            for own, one in zip(net.weights, alone.weights, strict=True)
            if one.grad is not None
        ]
        optimizer.step()
    guard.close()
    return float(max(far))


def main() -> None:
    out, seed, updates = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with ranked() as rank:
        net, optimizer = built(seed if dist.is_initialized() else None)
        guard = Guard(out / "run", model=net, optimizer=optimizer, **RULES)
        for batch in guard.over(batches(poison=True), steps=updates):
            if guard.ok(net.backward(batch)):
                optimizer.step()
            optimizer.zero_grad()
        end = {"digest": guard.state_digest(), "skipped": guard.skipped, "from": guard.resumed_step}
        guard.close()
        tensors = [*net.weights, *(t for state in optimizer.state.values() for t in state.values())]
        end["bytes"] = sum(t.numel() * t.dtype.itemsize for t in tensors)
        with Ring(out / "ring", {"net": net, "optimizer": optimizer}) as ring:
            end["ring"] = ring.digest()  # of the first start, which all others load and save
            ring.save(updates)
        end["clipped"] = clipped(out / str(updates), seed if dist.is_initialized() else None)
        if rank == 0:
            (out / "end.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main()

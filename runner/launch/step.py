"""What a Slurm job tells its nodes: who takes part, who is the head, where they meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NODES = "HOLDFAST_NODES"
PORT = "HOLDFAST_PORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Seen from one node. The first node keeps the rendezvous."""

    num_nodes: int
    head: tuple[str, int]
    hosts: bool
    local_address: str


def announce(addresses: Sequence[tuple[str, str]], port: int) -> dict[str, str]:
    """The environment for every node's process, from (node, address) pairs, head first."""
    return {NODES: ",".join(f"{node}={address}" for node, address in addresses), PORT: str(port)}


def meeting(environment: Mapping[str, str]) -> Meeting | None:
    """What :func:`announce` said, None outside of a Slurm step."""
    if NODES not in environment or "SLURMD_NODENAME" not in environment:
        return None
    pairs = [word.split("=", 1) for word in environment[NODES].split(",")]
    own = environment["SLURMD_NODENAME"]
    return Meeting(
        num_nodes=len(pairs),
        head=(pairs[0][1], int(environment[PORT])),
        hosts=pairs[0][0] == own,
        local_address=dict((node, address) for node, address in pairs)[own],
    )

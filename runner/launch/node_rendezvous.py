"""What a Slurm job passes to its nodes: the nodes, their head, and the rendezvous endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.system.error import ConfigError

NODES = "HOLDFAST_NODES"
PORT = "HOLDFAST_PORT"
MOST_BYTES = 1 << 14  # of a list of names in a variable or an argument; Linux takes 128 KiB of each
_IN_FILE = "@"  # what follows is a path; no node's name begins so


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The rendezvous as node ``number`` sees it. The first node hosts it."""

    num_nodes: int
    number: int
    head: tuple[str, int]
    hosts: bool
    local_address: str


def announce(addresses: Sequence[tuple[str, str]], port: int, *, file: Path) -> dict[str, str]:
    """The environment for every node's process, from (node, address) pairs, head first.

    Args:
        file: gets the names if they are too many for a variable; every node can read it.
    """
    names = ",".join(f"{node}={address}" for node, address in addresses)
    if len(names) > MOST_BYTES:
        file.write_text(names + "\n")
        names = f"{_IN_FILE}{file}"
    return {NODES: names, PORT: str(port)}


def meeting(environment: Mapping[str, str]) -> Meeting | None:
    """What :func:`announce` put into the environment; None outside of a Slurm step.

    Raises:
        ConfigError: the file with the names cannot be read here.
    """
    if NODES not in environment or "SLURMD_NODENAME" not in environment:
        return None
    names = environment[NODES]
    if names.startswith(_IN_FILE):
        try:
            names = Path(names.removeprefix(_IN_FILE)).read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"{NODES}={names}: the names of this job's nodes cannot be read ({error}); "
                "out must lie where every node sees it"
            ) from None
    pairs = [word.split("=", 1) for word in names.split(",")]
    own = environment["SLURMD_NODENAME"]
    nodes = [node for node, _ in pairs]
    return Meeting(
        num_nodes=len(pairs),
        number=nodes.index(own),
        head=(pairs[0][1], int(environment[PORT])),
        hosts=nodes[0] == own,
        local_address=dict((node, address) for node, address in pairs)[own],
    )

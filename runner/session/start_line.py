"""The journal line of a start, and the account of the time before it.

Both a run (:mod:`runner.session.begin`) and a user's loop (:mod:`runner.embed.opening`) use them.
"""

from __future__ import annotations

import time
from typing import Any

from runner.distributed.device import device_facts
from runner.distributed.rendezvous import difference
from runner.policy.decision.history import Incident
from runner.run_dir.build_info import ranks_on, versions
from runner.run_dir.time_account import Past, past
from runner.session.group import RankGroup
from runner.session.phases import Lease
from runner.startup.resume import Resumed
from runner.system.json_lines import iter_lines
from runner.system.process import host_name


def time_before(group: RankGroup, resumed: Resumed, journal: list[dict[str, Any]]) -> Past:
    """How the run's time was spent before this start; only rank 0 reads it.

    Args:
        journal: the lines of the journal.
    """
    if not group.is_first:
        return past([], [], [])
    path, length = group.run_dir.metrics, resumed.metrics_bytes
    return past(
        iter_lines(path, stop=length),
        iter_lines(path, start=length),
        journal,
        summary=group.run_dir.stored_summary(),
        now=time.time(),
    )


def start_incident(
    group: RankGroup,
    lease: Lease,
    resumed: Resumed,
    spent: Past,
    *,
    reason: str,
    parallel: str,
    data: str,
) -> Incident:
    """The incident of this start, alike on all ranks. Collective.

    Args:
        spent: the time before this start, see :func:`time_before`.
        reason: what started the run.
        parallel: how the state is laid over the ranks.
        data: the fingerprint of the data.
    """
    by_rank = group.ranks.gather({"host": host_name(), **device_facts(group.device)})
    hosts = [str(facts.pop("host")) for facts in by_rank]
    if differing := difference(by_rank):
        group.console.say(f"warning: the ranks' devices differ: {differing}")
    before = group.ranks.from_first({"lost": spent.lost, "idle_seconds": spent.idle_seconds})
    return Incident(
        kind="start",
        step=resumed.step,
        decision=f"go on from step {resumed.step}" if resumed.step else "begin",
        reason=reason,
        detail={
            "incarnation": lease.run_lease.number,
            "world_size": group.place.world_size,
            "hosts": {host: ranks_on(host, hosts) for host in dict.fromkeys(hosts)},
            "parallel": parallel,
            "device": group.device.type,
            **versions(),
            **{name: text for name, text in group.device_versions.items() if name != "device"},
            "settings": lease.config_digest,
            "data": data,
            "debug": dict(group.debug),
            **before,
            "tier": resumed.tier.value if resumed.step else None,
        },
    )

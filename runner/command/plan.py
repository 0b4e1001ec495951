"""``python -m runner plan``: predicts what failures and checkpoints will cost a large run.

Compares synchronous checkpoints, checkpoints written in the background, and
snapshots in memory with a disk ring below them, each at its best interval. Missing numbers
come from a run's own records (--run), then from a preset. With --ranks and the settings of a run
it says instead what a rank's memory would have to hold.
"""

from __future__ import annotations

import math
import random
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from runner.command.arguments import Parser
from runner.observe.journal import read_journal
from runner.policy.retention.interval import LLAMA3_NODES, NODE_MTBF_HOURS, availability_interval
from runner.system.error import ConfigError
from runner.system.parsing import json_text
from runner.system.units import counted, duration
from runner.tools.goodput import (
    BYTES_PER_PARAMETER,
    LLAMA3_PARAMETERS,
    Costs,
    RunPlan,
    Strategy,
    Trace,
    Value,
    Values,
    daly_interval,
    measured,
    plan,
    read_failures,
    share_in_memory,
    trace_goodput,
    young_interval,
)

_JOBS = 20  # over a trace
_TIERS = {"sync": Strategy.synchronous, "async": Strategy.asynchronous, "ring": Strategy.ring}
# As the options spell them: the lower bound, whether it is allowed itself, and the help.
_INPUTS = {
    "nodes": (1, True, None),
    "mtbf_node_hours": (0.0, False, "between failures of one node"),
    "state_gb": (0.0, False, "a whole checkpoint, in 10^9 bytes; not with --params"),
    "step_seconds": (0.0, False, None),
    "save_seconds": (0.0, True, "writing a checkpoint to disk"),
    "stall_seconds": (0.0, True, "copying the state to host memory"),
    "restart_seconds": (0.0, True, "from detection to the next step"),
    "memory_restart_seconds": (0.0, True, "the same from memory; default: the same"),
    "detect_seconds": (0.0, True, "from a failure to its detection"),
    "memory_share": (0.0, True, "of failures that memory snapshots survive"),
    "slots": (1, True, "memory snapshots kept; default: 2"),
}


def plan_command(arguments: Sequence[str]) -> int:
    """Parse, compute, print; returns the exit code.

    Raises:
        ConfigError: an option is missing or out of bounds.
    """
    options = _parser().parse_intermixed_args(arguments)
    if options.ranks is not None or options.overrides:
        return _of_memory(options)
    names = [name for name in options.tiers.split(",") if name]
    if not names or not set(names) <= _TIERS.keys():
        allowed = ", ".join(_TIERS)
        raise ConfigError(f"--tiers {options.tiers}: choose from {allowed}, with commas between")
    trace = _read_trace(options)
    values = _values(options, trace)
    costs = _costs(values, mirrored=options.mirror)
    plans = [plan(costs, _TIERS[name]) for name in names]
    if trace:
        plans = [replace(one, over_trace=_over(trace, costs, one)) for one in plans]
    if options.json:
        sys.stdout.write(json_text(_json(values, costs, plans), indent=1) + "\n")
    else:
        _print(values, costs, plans)
    return 0


def _of_memory(options: Namespace) -> int:
    """
    Raises:
        ConfigError: no ``--ranks``, or options that are not of memory.
    """
    if options.ranks is None:
        raise ConfigError(
            f"plan {options.overrides[0]}: settings are for a plan of memory, which needs to know "
            "over how many ranks: --ranks N"
        )
    others = [*_INPUTS, "params", "run", "preset", "trace"]
    if given := [_option(name) for name in others if getattr(options, name) is not None]:
        raise ConfigError(
            f"{', '.join(given)}: not with --ranks, which plans memory; leave out either"
        )
    from runner.command.plan_memory import plan_memory  # torch, which the other plan does without

    return plan_memory(options)


def _parser() -> Parser:
    parser = Parser("plan", __doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--params", type=float, help="parameters; 12 bytes of state each")
    for name, (least, _, words) in _INPUTS.items():
        group = size if name == "state_gb" else parser
        group.add_argument(_option(name), type=type(least), help=words)
    parser.flag("--mirror", "keep each snapshot on another node as well")
    parser.option("--tiers", ",".join(_TIERS), "strategies to compare")
    parser.add_argument("--run", metavar="OUT", help="take what it measured from a run")
    parser.add_argument("--preset", choices=["llama3"], help="405B on 2,048 nodes")
    words = "play these failures too: JSON, events as in stepfun-ai/InfiniteHBD-Trace"
    parser.add_argument("--trace", metavar="FILE", help=words)
    words = "nodes that were traced; default: those that failed"
    parser.add_argument("--trace-nodes", type=int, metavar="N", help=words)
    parser.flag("--json")
    memory = parser.add_argument_group("memory of a rank, from the settings of a run")
    memory.add_argument("--ranks", type=int, help="over how many ranks")
    memory.add_argument("--ranks-per-node", type=int, default=8, help="default 8")
    memory.add_argument("--room-gib", type=float, help="what a rank's device has, in GiB")
    parser.add_settings()
    return parser


# -- where the numbers come from ------------------------------------------------------------


def _read_trace(options: Namespace) -> Trace | None:
    """
    Raises:
        ConfigError: the file has no failures, or they are of more nodes than were traced.
    """
    if options.trace is None:
        return None
    try:
        known = read_failures(Path(options.trace))
        failures = sorted((failure.begin * 86_400.0, failure.node) for failure in known)
        named = len({node for _, node in failures})
        if not 0 < failures[-1][0] < math.inf:
            raise ValueError("its last failure is at its beginning")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--trace {options.trace}: not a list of events with node_id, event_type (fault_start) "
            f"and event_time in days ({error!r})"
        ) from None
    if (options.trace_nodes or named) < named:
        raise ConfigError(f"--trace-nodes {options.trace_nodes}: {named} nodes failed")
    return Trace(failures=failures, num_nodes=options.trace_nodes or named)


def _over(trace: Trace, costs: Costs, chosen: RunPlan) -> float:
    """Goodput over the trace, of jobs on other nodes and at other times of it."""
    dice = random.Random(0)
    jobs = (trace.of_job(costs.nodes, dice) for _ in range(_JOBS))
    return fmean(trace_goodput(costs, times, trace.seconds, chosen, dice) for times in jobs)


def _values(options: Namespace, trace: Trace | None) -> Values:
    """Merge defaults, the preset, a run, the trace and the options, in this order."""
    share = share_in_memory(mirrored=options.mirror)
    values = {
        "detect_seconds": Value(0.0, "default"),
        "slots": Value(2.0, "default"),
        "memory_share": Value(share, "default: Llama 3's failures"),
    }
    if options.preset:
        values |= _llama3()
    if options.run:
        out = Path(options.run)
        if not (out / "journal.jsonl").is_file():
            raise ConfigError(f"--run {out}: no journal.jsonl there, so it is not a run")
        values |= measured(out, read_journal(out / "journal.jsonl")[0])
    if trace:
        failures = counted(len(trace.failures), "failure")
        source = f"{options.trace}: {failures} of {counted(trace.num_nodes, 'node')}"
        values["mtbf_node_hours"] = Value(trace.mtbf_node_hours, source)
    if options.params is not None:
        size = options.params * BYTES_PER_PARAMETER / 1e9
        values["state_gb"] = Value(size, f"{BYTES_PER_PARAMETER} bytes a parameter")
    for name in _INPUTS:
        if (given := getattr(options, name)) is not None:
            values[name] = Value(float(given), "given")
    if restart := values.get("restart_seconds"):
        same = Value(restart.number, "default: restart_seconds")
        values.setdefault("memory_restart_seconds", same)
    _check(values)
    return values


def _check(values: Values) -> None:
    missing = [name for name in _INPUTS if name not in values]
    if missing:
        # --memory-restart-seconds follows from --restart-seconds.
        asked = [_option(name) for name in missing if name != "memory_restart_seconds"]
        options = ", ".join(asked).replace("--state-gb", "--params or --state-gb")
        raise ConfigError(
            f"{options}: not known; give them, or --run OUT of a run that "
            "measured them, or --preset llama3"
        )
    for name, (least, inclusive, _) in _INPUTS.items():
        number = values[name].number
        if number < least or (number == least and not inclusive) or not number < float("inf"):
            allowed = f"at least {least:g}" if inclusive else f"above {least:g}"
            raise ConfigError(f"{_option(name)}={number:g}: must be {allowed} and finite")
    if values["memory_share"].number > 1:
        raise ConfigError(f"--memory-share={values['memory_share'].number:g}: must be at most 1")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _llama3() -> Values:
    """Llama 3 405B (arXiv 2407.21783); numbers that the paper lacks are marked as assumed."""
    state = LLAMA3_PARAMETERS * BYTES_PER_PARAMETER
    paper = "Llama 3 paper"
    # 16M tokens a step, 400 TFLOP/s on each of 16,384 GPUs; 2 TB/s sustained by the storage.
    step = 6 * LLAMA3_PARAMETERS * 16 * 2**20 / (16_384 * 400e12)
    return {
        "nodes": Value(LLAMA3_NODES, paper),
        "mtbf_node_hours": Value(NODE_MTBF_HOURS, f"{paper}: 419 in 54 days"),
        "state_gb": Value(state / 1e9, f"{BYTES_PER_PARAMETER} bytes a parameter"),
        "step_seconds": Value(step, f"{paper}: 16M tokens at 400 TFLOP/s"),
        "save_seconds": Value(state / 2e12, f"{paper}: storage of 2 TB/s"),
        "stall_seconds": Value(state / 16_384 / 10e9, "assumed: 10 GB/s to the host"),
        "restart_seconds": Value(300.0, "assumed"),
        "detect_seconds": Value(30.0, "assumed"),
    }


def _costs(values: Values, *, mirrored: bool) -> Costs:
    number: dict[str, Any] = {name: value.number for name, value in values.items()}
    nodes, hours = number.pop("nodes"), number.pop("mtbf_node_hours")
    return Costs(
        nodes=int(nodes),
        mtbf_seconds=hours * 3600 / nodes,
        state_bytes=number.pop("state_gb") * 1e9,
        slots=int(number.pop("slots")),
        mirrored=mirrored,
        **number,
    )


# -- what is shown --------------------------------------------------------------------------


def _formulas(costs: Costs) -> dict[str, float]:
    """Closed forms for synchronous checkpoints, in seconds."""
    save, mtbf = costs.save_seconds, costs.mtbf_seconds
    return {
        "young": young_interval(save, mtbf),
        "daly": daly_interval(save, mtbf),
        "availability": availability_interval(
            save, mtbf, costs.restart_seconds, costs.detect_seconds
        ),
    }


def _json(values: Values, costs: Costs, plans: Sequence[RunPlan]) -> dict[str, Any]:
    return {
        "inputs": {
            name: {"value": value.number, "from": value.source} for name, value in values.items()
        },
        "mtbf_seconds": costs.mtbf_seconds,
        "interval_seconds": _formulas(costs),
        "plans": [_finite(asdict(p)) | {"strategy": p.strategy.value} for p in plans],
    }


def _finite(numbers: dict[str, Any]) -> dict[str, Any]:
    """Replace infinity, which JSON lacks, by null."""
    return {name: None if value == float("inf") else value for name, value in numbers.items()}


def _print(values: Values, costs: Costs, plans: Sequence[RunPlan]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    inputs = Table("input", "value", "from", title="Costs", title_justify="left")
    inputs.columns[1].justify = "right"
    for name in _INPUTS:
        inputs.add_row(name, f"{values[name].number:,.4g}", values[name].source)
    console.print(inputs)
    console.print(_plans_table(costs, plans))
    formulas = _formulas(costs)
    console.print(
        f"a failure every {duration(costs.mtbf_seconds)}. Between checkpoints that training waits "
        f"for: Young {duration(formulas['young'])}, Daly {duration(formulas['daly'])}, for "
        f"availability {duration(formulas['availability'])}"
    )


def _plans_table(costs: Costs, plans: Sequence[RunPlan]) -> Table:
    table = Table(title="At the best interval; memory is of each host", title_justify="left")
    over = [] if plans[0].over_trace is None else ["over the trace"]
    heads = ["every", "on disk every", "goodput", "stalled", "lost per failure", "down per failure"]
    table.add_column("checkpoints")
    for name in (*heads, "memory", *over):
        table.add_column(name, justify="right")
    for best in plans:
        table.add_row(
            best.strategy.value,
            *(_every(steps, costs) for steps in (best.steps, best.disk_steps)),
            *(f"{share:.2%}" for share in (best.goodput, best.stall_share)),
            *(_seconds(seconds) for seconds in (best.lost_seconds, best.down_seconds)),
            f"{best.memory_bytes / 1e9:,.1f} GB",
            *([] if best.over_trace is None else [f"{best.over_trace:.2%}"]),
        )
    return table


def _every(steps: int, costs: Costs) -> str:
    return f"{counted(steps, 'step')} ({duration(steps * costs.step_seconds)})"


def _seconds(seconds: float) -> str:
    return "forever" if seconds == float("inf") else duration(seconds)

"""Draws cases: a pure function of a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from runner.fault.spec import parse_faults
from scripts.swarm.case import Break, Case
from scripts.swarm.command import BATCH, EVERY, MIXTURES, STEPS

_PARTS = ("dropout", "batchnorm", "eval_norm", "eval_drop", "tied", "frozen", "half")
_LOOP_PARTS = ("dropout", "batchnorm", "eval_norm", "eval_drop", "tied", "frozen")
_LAYOUTS = (
    *(("single", 1),) * 4,
    *(("fsdp", 1), ("fsdp", 2), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4)),
    *(("ddp", 2), ("ddp", 2), ("ddp", 3), ("hsdp", 4)),
)
_TRACKERS = (*("tensorboard", "Recorder", "Broken", "Hanging") * 2, "wandb", "mlflow")
_OBSERVERS = (
    *("memory line", "layers", "layer report", "sources", "spike score", "tracker", "ring lines"),
    *("live line", "pace", "rank times", "replicas", "audit", "preflight", "curve", "explain"),
    *("explain", "explain", "evidence", "names", "resume check"),
)
_SETTINGS = (
    *("compute.recompute=blocks", "compute.recompute=selective", "compute.deterministic=true"),
    *("parallel.reduce_each_micro_batch=false", "parallel.reshard_after_forward=false"),
    *("parallel.offload=cpu", "schedule=wsd", "schedule=linear", "guard.margin=2", "guard.back=3"),
    *("checkpoint.keep_every=12", "checkpoint.write_mib_per_second=1", "debug=collectives"),
    *("checkpoint.remote=file://OUT-remote", "track.report_minutes=0.02", "track.read=false"),
    *("watchdog.straggler_every=3", "launch.warm=false", "data.cache=OUT-cache"),
)
_LOOP_SETTINGS = (
    *("keep=1", "keep_every=12", "clean_after=1", "write_mib_per_second=1", "memory_slots=4"),
    *("persist=2", "margin=2", "ahead=3", "back=3", "window=12"),
)
_REMIXES = ((3.0, 1.0, 1.0), (1.0, 0.0, 2.0))
_ZERO = (("zero1", 2), ("zero2", 2), ("zero3", 2))


def draw(seed: int) -> Case:
    """The case of a seed."""
    dice = random.Random(seed)
    if dice.random() < 0.02:  # slow to import
        kill = Break(at=f"batch:{dice.randint(8, 50)}")
        where = dice.choice(("hf", "lightning", "accelerate", "nano"))
        return Case(where=where, ranks=2, breaks=(kill,) if dice.random() < 0.7 else ())
    case = _loop(dice) if dice.random() < 0.3 else _runner(dice)
    # From dice of its own, so that older features of a seed stay as they were.
    newer = random.Random(f"newer {seed}")
    return _newer_runner(newer, case) if case.is_runner else _newer_loop(newer, case)


def _newer_runner(dice: random.Random, case: Case) -> Case:
    breaks = tuple(
        replace(one, how="notice") if one.how in ("term", "int") and dice.random() < 0.4 else one
        for one in case.breaks
    )
    advice = dice.randint(2, STEPS - 4) if dice.random() < 0.15 else 0
    case = replace(case, breaks=breaks, advice=advice, auto=dice.random() < 0.1)
    if case.data == "own" and dice.random() < 0.4:
        case = replace(case, data="stream")
    if case.evaluate and dice.random() < 0.25:
        case = replace(case, stop_after=dice.choice((1, 2, 3)))
    if dice.random() < 0.3:
        case = replace(case, settings=_settings(dice, case))
    return case


def _settings(dice: random.Random, case: Case) -> tuple[str, ...]:
    layouts = [case.engine, *(one.engine for one in case.breaks)]
    with_zero = any(one.startswith("zero") for one in layouts)
    among = [one for one in _SETTINGS if not (with_zero and one.startswith("parallel."))]
    return tuple(dice.sample(among, dice.choice((1, 1, 2))))


def _newer_loop(dice: random.Random, case: Case) -> Case:
    if case.ring_alone or case.mirror:
        return case
    case = replace(case, logs=dice.random() < 0.4, checks_stop=dice.random() < 0.5)
    case = replace(case, waits=random.Random(f"{case.seed} waits").random() < 0.3)
    of_settings = random.Random(f"{case.seed} settings")
    if of_settings.random() < 0.4:
        among = _LOOP_SETTINGS if case.memory else [s for s in _LOOP_SETTINGS if "memory" not in s]
        case = replace(case, settings=tuple(of_settings.sample(among, of_settings.choice((1, 2)))))
    on_mesh = random.Random(f"{case.seed} mesh").random() < 0.3
    if on_mesh and case.engine == "fsdp" and case.data != "sampler":
        case = replace(case, engine="mesh", ranks=4)
    if dice.random() < 0.35:
        full = tuple(sorted(dice.sample(range(3, 34), dice.choice((1, 1, 2)))))
        case = replace(case, out_of_memory=dice.choice(("halve", "skip")), full=full)
    if not case.evaluate:
        return case
    breaks = tuple(
        replace(one, at=f"evaluate:{dice.randint(1, 3)}") if dice.random() < 0.5 else one
        for one in case.breaks
    )
    return replace(case, breaks=breaks)


def _traits(dice: random.Random, among: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(dice.sample(list(among), dice.choice((1, 1, 2, 2, 3)))))


def _runner(dice: random.Random) -> Case:
    engine, ranks = dice.choice(_LAYOUTS if dice.random() < 0.95 else _ZERO)
    model = _traits(dice, _PARTS) if dice.random() < 0.5 else ()
    data = dice.choice(("synthetic", "synthetic", "own", "augmented", "packed", "text",
                        "texts", "mixture", "levels", "levels"))  # fmt: skip
    if model and data in ("packed", "synthetic"):
        data = "own"
    case = Case(
        seed=dice.randrange(1000),
        engine=engine,
        ranks=ranks,
        model=model,
        data=data,
        optim=dice.choice(("adamw", "adamw", "adamw", "sgd", "lion", "muon", "adafactor")),
        ema=dice.random() < 0.2,
        micro=dice.choice((8, 8, 4, 2, 1)),
        precision=dice.choice(("fp32", "fp32", "fp32", "fp32", "bf16")),
        units=dice.choice((1.0, 1.0, 100.0)) if model else 1.0,
        evaluate=dice.choice((0, 1, 5, 8)),
        audit=dice.choice((0, 0, 5, 7)),
        layers=dice.choice((0, 0, 2, 7)),
        replicas=dice.choice((0, 0, 0, 6)),
        preflight=dice.random() < 0.1,
        explain=dice.choice(("off", "quick", "quick", "quick", "full")),
        tracker=dice.choice(_TRACKERS) if dice.random() < 0.1 else "",
        late=dice.random() < 0.3,
        workers=dice.choice((0, 0, 0, 0, 1)),
        keep=dice.choice((1, 3, 3)),
        memory=dice.random() < 0.3,
        background=dice.random() < 0.5,
    )
    if data == "levels" and dice.random() < 0.8:
        case = replace(case, optim="adamw")
    if case.replicas:  # what was saved since the last look is distrusted
        case = replace(case, keep=3)
    case = replace(case, late_copies=case.memory and dice.random() < 0.5)
    case = replace(case, best=bool(case.evaluate) and dice.random() < 0.3)
    if case.explain != "off" and dice.random() < 0.8:
        case = replace(case, remedy="verdict")
    case = replace(case, faults=_faults(dice, case))
    case = replace(case, breaks=_breaks(dice, case))
    if data in MIXTURES and dice.random() < 0.3:
        case = _remixed(dice, case)
    if not case.faults and ranks > 1 and dice.random() < 0.6:
        case = replace(case, sick=_sick(dice, ranks, (11, 20)))
        if case.explain == "quick" and dice.random() < 0.2:
            case = replace(case, faults=_BUDGET, sick=_sick(dice, ranks, (20, 24)))
    layouts = [engine, *(one.engine for one in case.breaks)]
    if any(one.startswith("zero") for one in layouts) and dice.random() < 0.8:  # else refused
        case = replace(case, precision="bf16", optim=dice.choice(("adamw", "adamw", "sgd", "lion")))
    if data == "packed" and dice.random() < 0.5:
        case = replace(case, flaky=1.0)
    return case


def _remixed(dice: random.Random, case: Case) -> Case:
    """New weights between two checkpoints, behind a sample that was skipped there."""
    step = EVERY * dice.randint(1, 3) + dice.randint(1, 3)
    bad = (step - 1) * BATCH + dice.randrange(BATCH)
    one = Break(at=f"step:{step + dice.randint(1, 2)}", weights=dice.choice(_REMIXES))
    return replace(case, faults=(f"poison@samples={bad}-{bad}",), breaks=(one,), memory=False,
                   late_copies=False)  # fmt: skip


# Each takes three computations of a step: of explain=quick's sixty none is left for an incident.
_BUDGET = tuple(f"nan_loss@step={step},rank=0" for step in range(2, 20))


def _sick(dice: random.Random, ranks: int, between: tuple[int, int]) -> str:
    how = dice.choice(("noise", "gradient", "pattern", "sum"))
    # All but one at most, so that a sound one is left to tell.
    at_fault = dice.sample(range(ranks), dice.randint(1, max(1, ranks - 1)))
    return f"{how}@step={dice.randint(*between)},ranks={'+'.join(map(str, sorted(at_fault)))}"


def _faults(dice: random.Random, case: Case) -> tuple[str, ...]:
    if dice.random() < 0.25:
        return ()
    if case.ranks > 1 and case.audit and dice.random() < 0.3:
        at = f"step={dice.choice((1, 3, 6, 9, 12))},rank={dice.randrange(case.ranks)}"
        module = "layers.0" if case.model else "blocks.0.ffn.down"
        return (dice.choice((f"wrong@{at}", f"wrong_grad@{at},module={module}")),)
    more = tuple(_fault(dice, case) for _ in range(dice.choice((1, 1, 1, 2, 3))))
    if case.data in ("mixture", "levels") and dice.random() < 0.8:
        # Where sources differ, what is outstanding shows only once the model has learnt.
        late = dice.randrange(14 * BATCH, (STEPS - 4) * BATCH)
        is_spike = case.data == "levels" and dice.random() < 0.6
        spike = f"spike@samples={late},scale={dice.choice((15, 30, 60))}"
        return (spike if is_spike else _poison(dice), *more)
    return more


def _poison(dice: random.Random) -> str:
    first = dice.randrange(2 * BATCH, (STEPS - 2) * BATCH)
    return f"poison@samples={first}-{first + dice.choice((0, 0, 0, 1))}"


def _fault(dice: random.Random, case: Case) -> str:
    step, rank = dice.randint(2, STEPS - 3), dice.randrange(case.ranks)
    kinds = [
        *("nan_grad", "nan_loss", "flip_grad", "poison", "poison", "poison", "spike", "spike"),
        *("end", "sticky", "misread", "spoil_state", "mismatch", "corrupt_checkpoint", "slow"),
        *("range", "raise", "raise", "overflow", "oom"),
    ]
    kinds += ["flip_bit"] if case.engine in ("ddp", "hsdp") else []
    kinds += ["corrupt_snapshots"] if case.memory else []
    if case.ranks > 1 and dice.random() < 0.15:
        return _stray(dice, step, dice.randrange(1, case.ranks))
    kind, near = dice.choice(kinds), f"step={step},rank={rank}"
    first = max(step, 10) * BATCH + dice.randrange(BATCH)
    looks = f"observer={dice.choice(_OBSERVERS)},step={step},call={dice.choice((0, 0, 1, 2, 4))}"
    module = "head" if case.model else "blocks.0.ffn"
    texts = {
        "poison": _poison(dice),
        "spike": f"spike@samples={first},scale=60",
        # Lasts for some steps: a rollback.
        "range": f"poison@samples={first}-{first + dice.randint(2, 4) * BATCH}",
        "corrupt_checkpoint": f"corrupt_checkpoint@step={max(step, 8)}",
        "end": f"{dice.choice(('kill', 'kill', 'abort'))}@{near},{_point(dice)}",
        "raise": f"raise@{looks}{dice.choice(('', f',rank={rank}'))}",
        "overflow": f"overflow@step={step}-{step + dice.randint(0, 2)},module={module}",
        "oom": f"oom@{near},rows={dice.choice((1, 2, 4))}",
        "slow": f"slow@{near},seconds=0.3",
    }
    return texts.get(kind, f"{kind}@{near}")


def _point(dice: random.Random) -> str:
    at = ("fetch", "forward", "backward", "agree", "apply", "save", "rollback")
    return f"at={dice.choice(at)}"


def _stray(dice: random.Random, step: int, rank: int) -> str:
    """A rank that others wait for, or that is found where it meets them."""
    kind = dice.choice(
        ("hang", "stop", "skip_collective", "other_collective", "other_shape", "no_break",
         "wrong_product")
    )  # fmt: skip
    if kind in ("hang", "stop"):
        return f"{kind}@step={step},rank={rank},{_point(dice)}"
    step = {"no_break": 1, "wrong_product": 0}.get(kind, step)
    return f"{kind}@step={step},rank={rank}"


def _breaks(dice: random.Random, case: Case) -> tuple[Break, ...]:
    if dice.random() < (0.2 if case.data in MIXTURES else 0.4):
        return ()
    return tuple(_break(dice, case) for _ in range(dice.choice((1, 1, 1, 2))))


def _break(dice: random.Random, case: Case) -> Break:
    how = dice.choice(("kill", "kill", "kill_one", "term", "term", "int"))
    places = [f"step:{dice.choice(_steps(dice, case))}"] * 2
    places += [f"evaluate:{dice.randint(1, 3)}"] if case.evaluate else []
    places += ["explain:1"] * 2 if case.explain != "off" and case.faults else []
    places += [f"save:{dice.randint(1, 4)}", "finish:1"] if how.startswith("kill") else []
    places += ["roll back:1", "start:1"] if how.startswith("kill") else []
    one = Break(how=how, at=dice.choice(places), delay=round(dice.random() * 0.3, 3))
    if dice.random() < 0.3:
        engine, ranks = dice.choice(_LAYOUTS if dice.random() < 0.8 else _ZERO)
        one = replace(one, engine=engine, ranks=ranks)
    if case.data == "texts" and dice.random() < 0.5:
        return replace(one, at=f"tokenise:{dice.randint(1, 3)}")
    if case.data in MIXTURES and dice.random() < 0.8:
        # New weights are settled where the run had got, so mostly between two checkpoints.
        at = f"step:{dice.choice(_steps(dice, case))}" if dice.random() < 0.8 else one.at
        how = "kill" if dice.random() < 0.8 else one.how
        one = replace(one, how=how, at=at, weights=dice.choice(_REMIXES))
    return one


def _steps(dice: random.Random, case: Case) -> list[int]:
    """Any step, and those soon after bad samples, before there is a checkpoint behind them."""
    faults = parse_faults(case.faults)
    firsts = [fault.samples[0] // BATCH + 1 for fault in faults if fault.samples != (0, 0)]
    firsts = firsts or [fault.steps[0] for fault in faults]
    soon = [first + dice.randint(1, 3) for first in firsts if first + 3 < STEPS]
    return [dice.randint(2, STEPS - 4), *soon, *soon]


def _loop(dice: random.Random) -> Case:
    engine, ranks = dice.choice((("single", 1), ("single", 1), ("ddp", 2), ("ddp", 3), ("fsdp", 2),
                                 ("fsdp", 2), ("fsdp", 1)))  # fmt: skip
    case = Case(
        where="loop",
        seed=dice.randrange(1000),
        engine=engine,
        ranks=ranks,
        model=_traits(dice, _LOOP_PARTS) if dice.random() < 0.8 else (),
        data=dice.choice(("list", "list", "own", "windows", "windows", "shuffled", "stateful",
                          "sampler", "sampler")),
        optim=dice.choice(("adamw", "adamw", "sgd")),
        units=dice.choice((1.0, 1.0, 1.0, 100.0)),
        evaluate=dice.choice((0, 0, 5)),
        late=dice.random() < 0.3,
        memory=dice.random() < 0.5,
        clip=dice.choice((0.0, 0.0, 0.5)) if engine != "fsdp" else 0.0,
        accumulate=dice.choice((1, 1, 2, 2, 3)),
        looked=dice.random() < 0.3,
        precision=dice.choice(("fp32", "fp32", "fp32", "bf16")),
    )  # fmt: skip
    # sync=False: what stands beside the optimizer's step is done for refused steps too.
    case = replace(case, ema=not case.late and dice.random() < 0.3)
    case = replace(case, mirror=case.memory and dice.random() < 0.05)
    case = replace(case, late_copies=case.memory and dice.random() < 0.5)
    # torch's fused SGD does not take shards, and leaves garbage in BF16 momentum on CPUs.
    if case.late and (engine == "fsdp" or case.precision == "bf16"):
        case = replace(case, optim="adamw")
    if dice.random() < 0.15:
        # On three ranks DDP adds gradients in another order in its first step.
        case = replace(
            case, ranks=min(ranks, 2), ring_alone=True, data="list", accumulate=1,
            clip=0.0, evaluate=0, ema=False, mirror=False,
        )  # fmt: skip
        return replace(case, breaks=_loop_breaks(dice, case))
    bad = sorted(dice.sample(range(3, 34), dice.choice((0, 1, 1, 2))))
    if dice.random() < 0.3:
        first = dice.randint(12, 26)
        bad = sorted({*bad, *range(first, first + 3 * case.accumulate)})
    return replace(case, bad=tuple(bad), breaks=_loop_breaks(dice, case))


def _loop_breaks(dice: random.Random, case: Case) -> tuple[Break, ...]:
    count = dice.choice((0, 1, 1, 2))
    others = (0, 1, 2, 3) if case.data == "sampler" and case.engine != "single" else (0,)
    return tuple(
        Break(
            how=dice.choice(("kill", "kill_one", "term")),
            at=f"batch:{dice.randint(2, 18)}",
            ranks=dice.choice(others),
        )
        for _ in range(count)
    )

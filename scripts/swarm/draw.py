"""Draws cases: a pure function of a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from runner.fault.spec import parse_faults
from scripts.swarm.case import Break, Case
from scripts.swarm.command import BATCH, MIXTURES, STEPS

_PARTS = ("dropout", "batchnorm", "eval_norm", "eval_drop", "tied", "frozen", "half")
_LOOP_PARTS = ("dropout", "batchnorm", "eval_norm", "eval_drop", "tied", "frozen")
_LAYOUTS = (
    *(("single", 1),) * 4,
    *(("fsdp", 1), ("fsdp", 2), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4)),
    *(("ddp", 2), ("ddp", 2), ("ddp", 3), ("hsdp", 4)),
)
_OBSERVERS = (
    *("memory line", "layers", "layer report", "sources", "spike score", "tracker", "ring lines"),
    *("live line", "pace", "rank times", "replicas", "audit", "preflight", "curve", "explain"),
    *("explain", "explain", "evidence", "names", "resume check"),
)
_ZERO = (("zero1", 2), ("zero2", 2), ("zero3", 2))


def draw(seed: int) -> Case:
    """The case of a seed."""
    dice = random.Random(seed)
    if dice.random() < 0.02:  # slow to import
        kill = Break(at=f"batch:{dice.randint(8, 50)}")
        where = dice.choice(("hf", "lightning", "accelerate", "nano"))
        return Case(where=where, ranks=2, breaks=(kill,) if dice.random() < 0.7 else ())
    if dice.random() < 0.3:
        return _loop(dice)
    return _runner(dice)


def _traits(dice: random.Random, among: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(dice.sample(list(among), dice.choice((1, 1, 2, 2, 3)))))


def _runner(dice: random.Random) -> Case:
    engine, ranks = dice.choice(_LAYOUTS if dice.random() < 0.95 else _ZERO)
    model = _traits(dice, _PARTS) if dice.random() < 0.5 else ()
    if model and engine.startswith("zero"):
        model = ()
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
        tracker=dice.random() < 0.1,
        late=dice.random() < 0.3,
        workers=dice.choice((0, 0, 0, 0, 1)),
        keep=dice.choice((1, 3, 3)),
        memory=dice.random() < 0.3,
        background=dice.random() < 0.5,
    )
    if engine.startswith("zero") and case.optim in ("muon", "adafactor"):
        case = replace(case, optim="adamw")
    if case.replicas:  # what was saved since the last look is distrusted
        case = replace(case, keep=3)
    case = replace(case, late_copies=case.memory and dice.random() < 0.5)
    case = replace(case, best=bool(case.evaluate) and dice.random() < 0.3)
    if case.explain != "off" and dice.random() < 0.8:
        case = replace(case, remedy="verdict")
    case = replace(case, faults=_faults(dice, case), breaks=_breaks(dice, case))
    if not case.faults and ranks > 1 and dice.random() < 0.6:
        case = replace(case, sick=_sick(dice, ranks))
    if data == "packed" and dice.random() < 0.5:
        case = replace(case, flaky=1.0)
    return case


def _sick(dice: random.Random, ranks: int) -> str:
    how = dice.choice(("noise", "gradient", "pattern", "sum"))
    # All but one at most, so that a sound one is left to tell.
    at_fault = dice.sample(range(ranks), dice.randint(1, max(1, ranks - 1)))
    return f"{how}@step={dice.randint(9, 20)},ranks={'+'.join(map(str, sorted(at_fault)))}"


def _faults(dice: random.Random, case: Case) -> tuple[str, ...]:
    if dice.random() < 0.25:
        return ()
    if case.ranks > 1 and case.audit and dice.random() < 0.3:
        step = dice.choice((1, 3, 6, 9, 12))
        return (f"wrong@step={step},rank={dice.randrange(case.ranks)}",)
    more = tuple(_fault(dice, case.ranks) for _ in range(dice.choice((1, 1, 1, 2, 3))))
    if case.data in ("mixture", "levels") and dice.random() < 0.6:
        # Where sources differ, what is outstanding shows only once the model has learnt.
        late = dice.randrange(14 * BATCH, (STEPS - 4) * BATCH)
        is_spike = case.data == "levels" and dice.random() < 0.6
        return (f"spike@samples={late},scale=60" if is_spike else _poison(dice), *more)
    return more


def _poison(dice: random.Random) -> str:
    first = dice.randrange(2 * BATCH, (STEPS - 2) * BATCH)
    return f"poison@samples={first}-{first + dice.choice((0, 0, 0, 1))}"


def _fault(dice: random.Random, ranks: int) -> str:
    step, rank = dice.randint(2, STEPS - 3), dice.randrange(ranks)
    kind = dice.choice(
        ("nan_grad", "nan_loss", "flip_grad", "poison", "poison", "poison", "spike", "spike",
         "kill", "sticky", "misread", "spoil_state", "mismatch", "corrupt_checkpoint", "slow",
         "range", "raise", "raise")
    )  # fmt: skip
    if kind == "poison":
        return _poison(dice)
    if kind == "spike":
        first = max(step, 10) * BATCH + dice.randrange(BATCH)
        return f"spike@samples={first},scale=60"
    if kind == "range":  # lasts for some steps: a rollback
        first = max(step, 10) * BATCH + dice.randrange(BATCH)
        return f"poison@samples={first}-{first + dice.randint(2, 4) * BATCH}"
    if kind == "corrupt_checkpoint":
        return f"corrupt_checkpoint@step={max(step, 8)}"
    if kind == "kill":
        at = dice.choice(("fetch", "forward", "backward", "agree", "apply", "save", "rollback"))
        return f"kill@step={step},rank={rank},at={at}"
    if kind == "raise":
        at = f"observer={dice.choice(_OBSERVERS)},step={step},call={dice.choice((0, 0, 1, 2, 4))}"
        return f"raise@{at}{dice.choice(('', f',rank={rank}'))}"
    if kind == "slow":
        return f"slow@step={step},rank={rank},seconds=0.3"
    return f"{kind}@step={step},rank={rank}"


def _breaks(dice: random.Random, case: Case) -> tuple[Break, ...]:
    if dice.random() < 0.4:
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
    if dice.random() < 0.3 and not case.engine.startswith("zero"):
        engine, ranks = dice.choice(_LAYOUTS)
        one = replace(one, engine=engine, ranks=ranks)
    if case.data == "texts" and dice.random() < 0.5:
        return replace(one, at=f"tokenise:{dice.randint(1, 3)}")
    if case.data in MIXTURES and dice.random() < 0.6:
        # New weights are settled where the run had got, so mostly between two checkpoints.
        at = f"step:{dice.choice(_steps(dice, case))}" if dice.random() < 0.7 else one.at
        how = "kill" if dice.random() < 0.7 else one.how
        weights = dice.choice(((3.0, 1.0, 1.0), (1.0, 0.0, 2.0)))
        one = replace(one, how=how, at=at, weights=weights)
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
        data=dice.choice(("list", "list", "own", "windows", "windows", "shuffled", "sampler")),
        optim=dice.choice(("adamw", "adamw", "sgd")),
        units=dice.choice((1.0, 1.0, 1.0, 100.0)),
        evaluate=dice.choice((0, 0, 5)),
        late=dice.random() < 0.3,
        memory=dice.random() < 0.5,
        clip=dice.choice((0.0, 0.0, 0.5)) if engine != "fsdp" else 0.0,
        accumulate=dice.choice((1, 1, 2, 2, 3)),
        looked=dice.random() < 0.3,
    )
    case = replace(case, late_copies=case.memory and dice.random() < 0.5)
    if case.late and engine == "fsdp":  # torch's fused SGD does not take shards
        case = replace(case, optim="adamw")
    if dice.random() < 0.15:
        # On three ranks DDP adds gradients in another order in its first step.
        return replace(
            case, ranks=min(ranks, 2), ring_alone=True, data="list", accumulate=1,
            breaks=_loop_breaks(dice), clip=0.0, evaluate=0,
        )  # fmt: skip
    bad = sorted(dice.sample(range(3, 34), dice.choice((0, 1, 1, 2))))
    if dice.random() < 0.3:
        first = dice.randint(12, 26)
        bad = sorted({*bad, *range(first, first + 3 * case.accumulate)})
    return replace(case, bad=tuple(bad), breaks=_loop_breaks(dice))


def _loop_breaks(dice: random.Random) -> tuple[Break, ...]:
    count = dice.choice((0, 1, 1, 2))
    hows = ("kill", "kill_one", "term")
    return tuple(
        Break(how=dice.choice(hows), at=f"batch:{dice.randint(2, 18)}") for _ in range(count)
    )

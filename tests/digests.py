"""What fixed runs end with: ``python -m tests.digests [--write] [--only WORD]``.

A refactoring changes no bit of a run. So ``tests/records/digests.json`` keeps, for each run of
:data:`RUNS` and :data:`SCRIPTS`, the state digest, the skipped positions and how many journal
lines of each kind there were. Without ``--write`` the runs are made again and compared; what
differs is printed, and the exit code is 1. They take instructions that every processor has, so
that the record holds on other machines.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "records" / "digests.json"
SAME_INSTRUCTIONS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
SHORT = ("steps=40", "checkpoint.every=8", "checkpoint.clean_after=4", "batch.micro_size=4")
# A NaN on one rank, one bad sample, bad samples over several steps, and a spike.
NAN, POISON = "nan_grad@step=14,rank=0", "poison@samples=500-501"
LASTING = "poison@samples=640-740"
SPIKE = "spike@samples=820-823,scale=60"
KILL = "kill@step=27,rank=0"
MIXTURE = (
    "data.sources=[{name: code, weight: 1, samples: 60, seed: 1},"
    "{name: web, weight: 3, samples: 300, seed: 2}]"
)
REDO = ("guard.remedy=verdict", "explain=quick")
LORA = "model.lora={r: 8, targets: all-linear, alpha: 32}"


def faults(*rows: str) -> str:
    return f"faults=[{','.join(rows)}]"


# Name to the number of ranks and the settings; ``{hf}`` is a folder of a Hugging Face model.
RUNS: dict[str, tuple[int, list[str]]] = {
    "single": (1, ["parallel=single", faults(NAN, POISON)]),
    "fsdp": (2, ["parallel=fsdp", faults(NAN, LASTING, SPIKE)]),
    "fsdp, three ranks": (3, ["parallel=fsdp", "batch.global_size=24", faults(NAN, LASTING)]),
    "fsdp, killed": (2, ["parallel=fsdp", faults(POISON, KILL)]),
    "fsdp, redo": (2, ["parallel=fsdp", *REDO, faults(NAN, POISON)]),
    "fsdp, explain full": (
        2,
        ["parallel=fsdp", "guard.remedy=verdict", "explain=full", faults(SPIKE)],
    ),
    "fsdp, sticky": (
        2,
        ["parallel=fsdp", *REDO, "guard.max_rollbacks=1", faults("sticky@step=21,rank=1")],
    ),
    "fsdp, numbers read late": (2, ["parallel=fsdp", "guard.sync=false", faults(NAN, LASTING)]),
    "fsdp, audits and layers": (
        2,
        [
            "parallel=fsdp",
            "debug.audit_every=5",
            "track.layers_every=4",
            faults(POISON, "wrong@step=23,rank=1"),
        ],
    ),
    "fsdp, a flipped bit": (
        2,
        [
            "parallel=fsdp",
            "guard.remedy=verdict",
            "explain=full",
            faults("spoil_state@step=21,rank=1", "flip_grad@step=30,rank=0"),
        ],
    ),
    "hsdp": (2, ["parallel=hsdp", "parallel.shard_size=1", faults(NAN, POISON)]),
    "ddp": (2, ["parallel=ddp", faults(NAN, LASTING)]),
    "zero1": (2, ["parallel=zero1", faults(NAN, POISON)]),
    "zero3": (2, ["parallel=zero3", faults(NAN, POISON)]),
    "mixture": (2, ["parallel=fsdp", MIXTURE, faults(POISON, LASTING)]),
    "muon": (2, ["parallel=fsdp", "optim=muon", faults(NAN, LASTING)]),
    "average of the weights": (
        2,
        ["parallel=fsdp", "optim.ema=0.99", "checkpoint.keep_best=1", faults(LASTING)],
    ),
    "adafactor": (2, ["parallel=fsdp", "optim=adafactor", faults(POISON)]),
    "dropout": (2, ["parallel=fsdp", "model.dropout=0.1", faults(NAN, LASTING, KILL)]),
    "hf": (2, ["model=hf", "model.path={hf}", "data.seq_len=32", "data.vocab_size=42"]),
    "hf, lora": (
        2,
        ["model=hf", "model.path={hf}", "data.seq_len=32", "data.vocab_size=42", LORA, faults(NAN)],
    ),
    "hf, packed": (
        1,
        [
            "model=hf",
            "model.path={hf}",
            "data=hf",
            "data.path={chats}",
            "data.messages=messages",
            "data.pack=true",
            "data.seq_len=48",
            "data.cache={cache}",
            faults(NAN),
        ],
    ),
}


def _guarded(layout: str, todo: str, **env: str) -> Callable[[Path], Any]:
    def ends(out: Path) -> Any:
        from tests.drills.test_guard_loop import run

        return run(out, layout, todo, ranks=0 if layout == "plain" else 2, restarts=1, **env)

    return ends


def _framework(name: str) -> Callable[[Path], Any]:
    def ends(out: Path) -> Any:
        from tests.script_run import ends_of

        return ends_of("frameworks.py", out, name, str(out), "poison", restarts=1, KILL_AT="47")

    return ends


SCRIPTS: dict[str, Callable[[Path], Any]] = {
    "Guard, plain": _guarded("plain", "break"),
    "Guard, ddp, killed": _guarded("ddp", "poison", KILL_AT="25"),
    "Guard, fsdp2": _guarded("fsdp", "poison"),
    "Guard, ddp, sync=False": _guarded("ddp", "poison", LATE="1"),
    "Guard, two batches a step": _guarded("micro", "poison"),
    "HF Trainer": _framework("hf"),
    "Lightning": _framework("lightning"),
    "Accelerate": _framework("accelerate"),
}


def _prepare(folder: Path) -> dict[str, str]:
    from tests import hf_folder

    model = hf_folder.tokenizer(hf_folder.llama(folder / "model"))
    chats = folder / "chats.jsonl"
    words = [f"{letter}{number}" for letter in "abcdefghij" for number in range(10)]
    rows = [
        [{"role": "user", "content": word}, {"role": "assistant", "content": 4 * word[0]}]
        for word in words
    ]
    chats.write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    return {"hf": str(model), "chats": str(chats), "cache": str(folder / "cache")}


def _end_of_run(name: str, folder: Path, paths: Mapping[str, str]) -> dict[str, Any]:
    from tests.run import train

    ranks, settings = RUNS[name]
    overrides = [
        word.format(**paths) if word.startswith(("model.path", "data.path", "data.cache")) else word
        for word in settings
    ]
    restarts = 1 if any(KILL in word for word in settings) else 0
    run = train(folder / "run", *SHORT, *overrides, ranks=ranks, restarts=restarts)
    if not (folder / "run" / "summary.json").exists():
        raise AssertionError(f"{name}: no summary\n{run.tail}")
    lines = Counter(line["kind"] for line in run.journal())
    return {
        "state_digest": run.summary["state_digest"],
        "status": run.summary["status"],
        "skipped": run.summary["skipped"],
        "journal": dict(sorted(lines.items())),
    }


def _end_of_script(name: str, folder: Path) -> dict[str, Any]:
    text = json.dumps(SCRIPTS[name](folder), sort_keys=True)
    kinds: Counter[str] = Counter()
    for path in sorted(folder.rglob("journal.jsonl")):
        kinds.update(json.loads(line)["kind"] for line in path.read_text().splitlines())
    return {
        "ends_digest": hashlib.sha256(text.encode()).hexdigest(),
        "journal": dict(sorted(kinds.items())),
    }


def measure(names: Sequence[str]) -> dict[str, Any]:
    """Make the runs, two at a time; returns what each ended with, or its error."""
    with tempfile.TemporaryDirectory() as scratch:
        paths = _prepare(Path(scratch))

        def end(number: int) -> dict[str, Any]:
            name, folder = names[number], Path(scratch) / f"{number}"
            folder.mkdir()
            try:
                found = (
                    _end_of_run(name, folder, paths)
                    if name in RUNS
                    else _end_of_script(name, folder)
                )
            except Exception as error:
                found = {"error": str(error)[-3000:]}
            print(f"{name}: {'FAILED' if 'error' in found else 'ended'}", flush=True)
            return found

        with ThreadPoolExecutor(2) as pool:
            return dict(zip(names, pool.map(end, range(len(names))), strict=True))


def main() -> int:
    """Make the runs, and keep or compare their ends."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.digests")
    parser.add_argument("--write", action="store_true", help="keep the ends as the record")
    parser.add_argument("--only", default="", help="only runs whose name has this word")
    arguments = parser.parse_args()
    os.environ.update(SAME_INSTRUCTIONS)
    names = [name for name in (*RUNS, *SCRIPTS) if arguments.only in name]
    ends = measure(names)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    failed = [name for name in names if "error" in ends[name]]
    if arguments.write:
        RECORD.write_text(json.dumps(record | ends, indent=1, sort_keys=True) + "\n")
    changed = [name for name in names if not arguments.write and ends[name] != record.get(name)]
    for name in dict.fromkeys([*changed, *failed]):
        print(f"{name}:\n  kept {record.get(name)}\n  now  {ends[name]}")
    print(f"{len(names) - len(changed)} of {len(names)} as kept, {len(failed)} failed")
    return 1 if changed or failed else 0


if __name__ == "__main__":
    sys.exit(main())

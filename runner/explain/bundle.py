"""The evidence of one bad step on disk, for a person and for `holdfast replay`.

``OUT/explanations/NNNNNN/``, where NNNNNN is the number of the journal line (``seq``) behind which
the step was looked into:

    incident.json       verdict, why, what was tried and not, and the numbers of every probe
    batch.safetensors   tokens of the samples to suspect; positions and indices of all
    samples.txt         what these samples are called, say, and how they stand out
    layers.json         of each module the largest output, and in the wider precision; if computed

Nothing is pickled. What is read back is bounded, and refused where it is not what was written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from runner.data.cursor import BatchPlan
from runner.data.dataset import Dataset, Sample
from runner.data.feed import describe
from runner.explain.finding import Finding
from runner.policy.decision.signals import Limits
from runner.system.files import make_folder, read_bounded, write_durably, write_json
from runner.system.parsing import parse_json, whole

INCIDENT, BATCH, SAMPLES = "incident.json", "batch.safetensors", "samples.txt"
LAYERS = "layers.json"
_MOST_JSON, _MOST_TENSORS = 16 << 20, 40 << 20  # bytes; with the texts below 64 MiB in all
_MOST_SUSPECTS = 64
_MOST_LAYERS = 4096
_LOUDEST = 8  # told where nobody is a culprit
_MOST_ROWS = 4096  # samples of a probe whose numbers are kept
_EXCERPT = 400  # characters of a sample
_GRAM = 8  # tokens
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A bad step as it was looked into: its number, samples, limits, and what was found."""

    step: int
    plan: BatchPlan
    limits: Limits
    finding: Finding


class Bundles:
    """Writes evidence; on one rank.

    Args:
        folder: ``OUT/explanations``.
        facts: of this machine and its software.
        check: raises where another start of the run may write now.
        say: takes a warning where nothing can be written.
    """

    def __init__(
        self,
        folder: Path,
        dataset: Dataset,
        *,
        facts: Mapping[str, Any],
        check: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._dataset = dataset
        self._facts = facts
        self._check = check
        self._say = say

    def write(self, number: int, told: Told) -> None:
        """Write one bundle; a disk that takes nothing is a warning, and no more."""
        self._check()
        folder = self._folder / f"{number:06d}"
        suspects = _suspects(told.finding)
        try:
            make_folder(folder)
            samples = self._samples(told, suspects)
            write_durably(folder / BATCH, _tensors(told.plan, samples))
            is_bytes = getattr(self._dataset, "vocab_size", 0) == 1 << 8
            text = _texts(told, samples, self._names(told, suspects), is_bytes=is_bytes)
            write_durably(folder / SAMPLES, text.encode())
            if told.finding.layers:
                layers = dict(list(told.finding.layers.items())[:_MOST_LAYERS])
                write_json(folder / LAYERS, layers, most_bytes=_MOST_LAYERS * 1024)
            # Last: a bundle without it was not finished.
            write_json(folder / INCIDENT, self._incident(told, suspects), most_bytes=_MOST_JSON)
        except OSError as error:
            self._say(f"warning: no evidence of step {told.step} was written: {error}")

    def conclude(self, number: int, finding: Finding) -> None:
        """What was found later, in the place of what could be told at once."""
        folder = self._folder / f"{number:06d}"
        self._check()
        try:
            told = read(folder)
            probes = {name: _trimmed(probe) for name, probe in finding.numbers.items()}
            tree = told | {"finding": finding.to_json(), "probes": probes}
            write_json(folder / INCIDENT, tree, most_bytes=_MOST_JSON)
        except (OSError, ValueError) as error:
            self._say(f"warning: the evidence in {folder} was not brought up to date: {error}")

    def _incident(self, told: Told, suspects: Sequence[int]) -> dict[str, Any]:
        finding = told.finding
        return {
            "version": _VERSION,
            "step": told.step,
            "samples": [told.plan.start, told.plan.stop],
            "limits": {"loss": told.limits.loss, "grad_norm": told.limits.grad_norm},
            "suspects": list(suspects),
            "finding": finding.to_json(),
            "probes": {name: _trimmed(probe) for name, probe in finding.numbers.items()},
            "facts": dict(self._facts),
        }

    def _samples(self, told: Told, suspects: Sequence[int]) -> dict[int, Sample]:
        """Tokens of the suspects by position, as the data set gives them now."""
        where, found, room = _indices(told.plan), {}, _MOST_TENSORS
        for position in suspects:
            try:
                sample = self._dataset[where[position]]
            except Exception:  # a data set may raise anything; its name is told all the same
                continue
            if isinstance(sample, Sample) and room >= 4 * sample.tokens.size:
                found[position] = sample
                room -= 4 * sample.tokens.size
        return found

    def _names(self, told: Told, suspects: Sequence[int]) -> dict[int, str]:
        where = _indices(told.plan)
        return {position: describe(self._dataset, where[position]) for position in suspects}


def read(folder: Path) -> dict[str, Any]:
    """What :meth:`Bundles.write` left in a folder.

    Raises:
        ValueError: it is no bundle, or not one of this version.
        OSError: it cannot be read, or is too large.
    """
    tree = parse_json(read_bounded(folder / INCIDENT, _MOST_JSON))
    if not isinstance(tree, dict) or tree.get("version") != _VERSION:
        raise ValueError(f"{folder / INCIDENT} is no evidence of version {_VERSION}")
    finding = tree.get("finding")
    if not isinstance(finding, dict) or not isinstance(tree.get("probes"), dict):
        raise ValueError(f"{folder / INCIDENT} has no finding")
    whole(tree.get("step"), "step")
    return tree


def bundles(*folders: Path) -> list[int]:
    """Numbers of the bundles in ``OUT/explanations``, the oldest first.

    And of those in further folders: earlier releases had them in ``OUT/incidents``.
    """
    names = {path.parent.name for folder in folders for path in folder.glob(f"*/{INCIDENT}")}
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def _suspects(finding: Finding) -> list[int]:
    """The culprits; where there are none the loudest samples of the step."""
    if finding.positions:
        return list(finding.positions[:_MOST_SUSPECTS])
    rows = finding.numbers.get("first", {}).get("samples", {})
    found = sorted(rows, key=lambda position: -_loudness(rows[position]))
    return sorted(int(position) for position in found[:_LOUDEST])


def _loudness(row: Sequence[float]) -> float:
    loss, norm = row[1], row[2]
    return loss if math.isfinite(loss) and math.isfinite(norm) else math.inf


def _trimmed(probe: Any) -> Any:
    """The loudest samples of a probe alone, where it has very many."""
    if not isinstance(probe, dict) or len(probe.get("samples", {})) <= _MOST_ROWS:
        return probe
    rows = probe["samples"]
    kept = sorted(rows, key=lambda position: -_loudness(rows[position]))[:_MOST_ROWS]
    return probe | {"samples": {position: rows[position] for position in kept}}


def _indices(plan: BatchPlan) -> dict[int, int]:
    return dict(zip(plan.positions.tolist(), plan.indices.tolist(), strict=True))


def _tensors(plan: BatchPlan, samples: Mapping[int, Sample]) -> bytes:
    """``positions`` and ``indices`` int64 [G]; ``suspects`` int64 [S]; ``tokens`` int32 [S, T]."""
    tensors = {
        "positions": torch.from_numpy(plan.positions.copy()),
        "indices": torch.from_numpy(plan.indices.copy()),
        "suspects": torch.tensor(list(samples), dtype=torch.int64),
    }
    if samples:
        rows = np.stack([sample.tokens for sample in samples.values()])
        tensors["tokens"] = torch.from_numpy(rows.astype(np.int32))
    return save(tensors)


def _texts(
    told: Told, samples: Mapping[int, Sample], names: Mapping[int, str], *, is_bytes: bool
) -> str:
    """A paragraph for each suspect; ``is_bytes``: the tokens are those of a text."""
    finding = told.finding
    rows = finding.numbers.get("first", {}).get("samples", {})
    parts = [f"step {told.step}: {finding.words()}\n"]
    for position, name in names.items():
        parts.append(f"\nstream position {position}: {_plain(name)}")
        row = rows.get(str(position))
        if row is not None:
            rank, loss, norm, count = row
            parts.append(
                f"  {loss / max(count, 1):.4g} nats per token over {count} tokens, gradient norm "
                f"{norm:.4g} at the embedding, on rank {rank}"
            )
        if position in samples:
            parts += _oddities(samples[position].tokens, is_bytes=is_bytes)
    return "\n".join(parts) + "\n"


def _oddities(tokens: Any, *, is_bytes: bool) -> list[str]:
    """What can be told from the tokens alone."""
    ids = tokens.tolist()
    counts = Counter(ids)
    shares = [count / len(ids) for count in counts.values()]
    entropy = -sum(share * math.log2(share) for share in shares)
    grams = Counter(tuple(ids[at : at + _GRAM]) for at in range(len(ids) - _GRAM + 1))
    most = max(grams.values(), default=0)
    lines = [
        f"  {len(ids)} tokens, {len(counts)} different, {entropy:.2f} bits of entropy; the most "
        f"frequent run of {_GRAM} tokens stands there {most} times"
    ]
    if is_bytes:
        text = bytes(ids).decode("utf-8", errors="replace")
        bad = text.count("�") / max(len(text), 1)
        lines.append(f"  {bad:.0%} is no UTF-8; as bytes: {_plain(text)}")
    else:
        lines.append(f"  ids: {_plain(' '.join(map(str, ids[:_EXCERPT])))}")
    return lines


def _plain(text: str) -> str:
    """The beginning, without what a terminal would act on."""
    shown = text[:_EXCERPT]
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in shown)

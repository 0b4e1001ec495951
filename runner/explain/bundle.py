"""The evidence of one bad step on disk, for a person and for `holdfast replay`.

``OUT/explanations/NNNNNN/``, where NNNNNN is the number of the journal line (``seq``) behind which
the step was looked into:

    incident.json       cause, reason, what was tried and what not, the numbers of every probe
    batch.safetensors   tokens of suspected samples; positions and indices of all samples
    samples.txt         names, text and unusual numbers of these samples
    layers.json         largest output of each module, also in wider precision; if computed

Nothing is pickled. Reads are bounded, and files of another format are refused.
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
from runner.data.dataset import Dataset, Sample, describe
from runner.data.draws import read_sample
from runner.policy.decision.finding import Finding
from runner.policy.decision.signals import Limits
from runner.run_dir.explanations import INCIDENT, MOST_JSON, SAMPLES, VERSION, read_explanation
from runner.system.files import make_folder, write_durably, write_json

BATCH = "batch.safetensors"
LAYERS = "layers.json"
_MOST_TENSORS = 40 << 20  # bytes; with the texts and MOST_JSON, less than 64 MiB in all
_MOST_SUSPECTS = 64
_MOST_LAYERS = 4096
_LOUDEST = 8  # samples to list if there are no culprits
_MOST_ROWS = 4096  # samples of a probe whose numbers are kept
_EXCERPT = 400  # characters of a sample
_GRAM = 8  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedStep:
    """An explained bad step: its number, samples, limits, and the finding."""

    step: int
    plan: BatchPlan
    limits: Limits
    finding: Finding


class Bundles:
    """Writes evidence, on one rank.

    Args:
        folder: ``OUT/explanations``.
        seed: of what samples draw.
        facts: of this machine and its software.
        check: raises if another start of the run is now the writer.
        say: receives a warning if nothing can be written.
    """

    def __init__(
        self,
        folder: Path,
        dataset: Dataset,
        *,
        seed: int,
        facts: Mapping[str, Any],
        check: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._dataset = dataset
        self._seed = seed
        self._facts = facts
        self._check = check
        self._say = say

    def write(self, number: int, step_: ExplainedStep) -> None:
        """Write one bundle; an I/O error is only a warning."""
        self._check()
        folder = self._folder / f"{number:06d}"
        suspects = _suspects(step_.finding)
        try:
            make_folder(folder)
            samples = self._samples(step_, suspects)
            write_durably(folder / BATCH, _tensors(step_.plan, samples))
            is_bytes = getattr(self._dataset, "vocab_size", 0) == 1 << 8
            text = _texts(step_, samples, self._names(step_, suspects), is_bytes=is_bytes)
            write_durably(folder / SAMPLES, text.encode())
            if step_.finding.layers:
                layers = dict(list(step_.finding.layers.items())[:_MOST_LAYERS])
                write_json(folder / LAYERS, layers, most_bytes=_MOST_LAYERS * 1024)
            # Written last: a bundle without it is incomplete.
            write_json(folder / INCIDENT, self._incident(step_, suspects), most_bytes=MOST_JSON)
        except OSError as error:
            self._say(f"warning: no evidence of step {step_.step} was written: {error}")

    def conclude(self, number: int, finding: Finding) -> None:
        """Replace the finding by one that was made later."""
        folder = self._folder / f"{number:06d}"
        self._check()
        try:
            step_ = read_explanation(folder)
            probes = {name: _trimmed(probe) for name, probe in finding.numbers.items()}
            tree = step_ | {"finding": finding.to_json(), "probes": probes}
            write_json(folder / INCIDENT, tree, most_bytes=MOST_JSON)
        except (OSError, ValueError) as error:
            self._say(f"warning: the evidence in {folder} was not updated: {error}")

    def _incident(self, step_: ExplainedStep, suspects: Sequence[int]) -> dict[str, Any]:
        finding = step_.finding
        return {
            "version": VERSION,
            "step": step_.step,
            "samples": [step_.plan.start, step_.plan.stop],
            "limits": {"loss": step_.limits.loss, "grad_norm": step_.limits.grad_norm},
            "suspects": list(suspects),
            "finding": finding.to_json(),
            "probes": {name: _trimmed(probe) for name, probe in finding.numbers.items()},
            "facts": dict(self._facts),
        }

    def _samples(self, step_: ExplainedStep, suspects: Sequence[int]) -> dict[int, Sample]:
        """The suspected samples by position, as the data set returns them now."""
        index_of, samples, bytes_left = _indices(step_.plan), {}, _MOST_TENSORS
        for position in suspects:
            try:
                sample = read_sample(self._dataset, index_of[position], (self._seed, position))
            except Exception:  # a data set may raise anything; the sample's name is written anyway
                continue
            if isinstance(sample, Sample) and bytes_left >= 4 * sample.tokens.size:
                samples[position] = sample
                bytes_left -= 4 * sample.tokens.size
        return samples

    def _names(self, step_: ExplainedStep, suspects: Sequence[int]) -> dict[int, str]:
        index_of = _indices(step_.plan)
        return {position: describe(self._dataset, index_of[position]) for position in suspects}


def _suspects(finding: Finding) -> list[int]:
    """The culprits, or the loudest samples of the step if there are none."""
    if finding.positions:
        return list(finding.positions[:_MOST_SUSPECTS])
    rows = finding.numbers.get("first", {}).get("samples", {})
    by_loudness = sorted(rows, key=lambda position: -_loudness(rows[position]))
    return sorted(int(position) for position in by_loudness[:_LOUDEST])


def _loudness(row: Sequence[float]) -> float:
    loss, norm = row[1], row[2]
    return loss if math.isfinite(loss) and math.isfinite(norm) else math.inf


def _trimmed(probe: Any) -> Any:
    """The probe with only its loudest samples, if it has very many."""
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
    step_: ExplainedStep, samples: Mapping[int, Sample], names: Mapping[int, str], *, is_bytes: bool
) -> str:
    """A paragraph for each suspect; ``is_bytes``: the tokens are bytes of text."""
    finding = step_.finding
    rows = finding.numbers.get("first", {}).get("samples", {})
    parts = [f"step {step_.step}: {finding.describe()}\n"]
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
    """Statistics of the tokens alone, and their text."""
    ids = tokens.tolist()
    counts = Counter(ids)
    shares = [count / len(ids) for count in counts.values()]
    entropy = -sum(share * math.log2(share) for share in shares)
    grams = Counter(tuple(ids[start : start + _GRAM]) for start in range(len(ids) - _GRAM + 1))
    highest_count = max(grams.values(), default=0)
    lines = [
        f"  {len(ids)} tokens, {len(counts)} different, {entropy:.2f} bits of entropy; the most "
        f"frequent run of {_GRAM} tokens occurs {highest_count} times"
    ]
    if is_bytes:
        text = bytes(ids).decode("utf-8", errors="replace")
        invalid_share = text.count("�") / max(len(text), 1)
        lines.append(f"  {invalid_share:.0%} is not UTF-8; as bytes: {_plain(text)}")
    else:
        lines.append(f"  ids: {_plain(' '.join(map(str, ids[:_EXCERPT])))}")
    return lines


def _plain(text: str) -> str:
    """The start of a text, with control characters escaped."""
    shown = text[:_EXCERPT]
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in shown
    )

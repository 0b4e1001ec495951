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
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from runner.data.cursor import BatchPlan
from runner.data.dataset import Sample, describe
from runner.data.draws import read_sample
from runner.distributed.device import versions
from runner.policy.decision.finding import Finding
from runner.policy.decision.signals import Limits
from runner.run_dir.paths import INCIDENT, MOST_JSON, SAMPLES, VERSION, read_explanation
from runner.system.files import make_folder, write_durably, write_json
from runner.system.process import host_name
from runner.train.run import EngineRun

BATCH = "batch.safetensors"
LAYERS = "layers.json"
_MOST_TENSORS = 40 << 20  # bytes; with the texts and MOST_JSON, less than 64 MiB in all
_MOST_SUSPECTS = 64
_MOST_LAYERS = 4096
_LOUDEST = 8  # samples to list if there are no culprits
_MOST_ROWS = 4096  # samples of a probe whose numbers are kept
_EXCERPT = 400  # characters of a sample
_GRAM = 8  # tokens


class Bundles:
    """Writes evidence to ``OUT/explanations``, on rank 0."""

    def __init__(self, run: EngineRun, seed: int) -> None:
        group = run.group
        self._folder = group.run_dir.explanations
        self._dataset = run.corpus.dataset
        self._seed = seed  # of what samples draw
        self._facts = {"host": host_name(), **versions(), **group.device_versions}
        self._check = run.lease.check
        self._say = group.console.say

    def write(
        self, number: int, step: int, plan: BatchPlan, limits: Limits, finding: Finding
    ) -> None:
        """Write the bundle of one bad step; an I/O error is only a warning."""
        self._check()
        folder = self._folder / f"{number:06d}"
        indices = dict(zip(plan.positions.tolist(), plan.indices.tolist(), strict=True))
        suspects = {position: indices[position] for position in _suspects(finding)}
        incident = {
            "version": VERSION,
            "step": step,
            "samples": [plan.start, plan.stop],
            "limits": {"loss": limits.loss, "grad_norm": limits.grad_norm},
            "suspects": list(suspects),
            **_found(finding),
            "facts": dict(self._facts),
        }
        try:
            make_folder(folder)
            samples = self._samples(suspects)
            write_durably(folder / BATCH, _tensors(plan, samples))
            text = f"step {step}: {finding.describe()}\n{self._texts(finding, suspects, samples)}"
            write_durably(folder / SAMPLES, text.encode())
            if finding.layers:
                layers = dict(list(finding.layers.items())[:_MOST_LAYERS])
                write_json(folder / LAYERS, layers, most_bytes=_MOST_LAYERS * 1024)
            # Written last: a bundle without it is incomplete.
            write_json(folder / INCIDENT, incident, most_bytes=MOST_JSON)
        except OSError as error:
            self._say(f"warning: no evidence of step {step} was written: {error}")

    def conclude(self, number: int, finding: Finding) -> None:
        """Replace the finding by one that was made later."""
        folder = self._folder / f"{number:06d}"
        self._check()
        try:
            tree = read_explanation(folder) | _found(finding)
            write_json(folder / INCIDENT, tree, most_bytes=MOST_JSON)
        except (OSError, ValueError) as error:
            self._say(f"warning: the evidence in {folder} was not updated: {error}")

    def _samples(self, suspects: Mapping[int, int]) -> dict[int, Sample]:
        """The suspected samples by position, as the data set returns them now.

        Args:
            suspects: their indices by position.
        """
        samples, bytes_left = {}, _MOST_TENSORS
        for position, index in suspects.items():
            try:
                sample = read_sample(self._dataset, index, (self._seed, position))
            except Exception:  # a data set may raise anything; the sample's name is written anyway
                continue
            if isinstance(sample, Sample) and bytes_left >= 4 * sample.tokens.size:
                samples[position] = sample
                bytes_left -= 4 * sample.tokens.size
        return samples

    def _texts(
        self, finding: Finding, suspects: Mapping[int, int], samples: Mapping[int, Sample]
    ) -> str:
        """A paragraph for each suspect."""
        vocabulary = getattr(self._dataset, "vocab_size", 0)
        is_bytes = vocabulary == 1 << 8
        rows = finding.numbers.get("first", {}).get("samples", {})
        parts = [""]
        for position, index in suspects.items():
            name = describe(self._dataset, index)
            parts.append(f"\nstream position {position}: {_plain(name)}")
            if str(position) in rows:
                rank, loss, norm, count = rows[str(position)]
                loss_of = f"{loss / (count or 1):.4g}"
                if vocabulary:
                    loss_of += f" nats per token over {count} tokens"
                parts.append(
                    f"  {'' if vocabulary else 'loss '}{loss_of}, gradient "
                    f"norm {norm:.4g} at the embedding, on rank {rank}"
                )
            if position in samples:
                parts += _oddities(samples[position].tokens, is_bytes=is_bytes)
        return "\n".join(parts) + "\n"


def _found(finding: Finding) -> dict[str, Any]:
    """The finding, and the numbers of its probes."""
    probes = {name: _trimmed(probe) for name, probe in finding.numbers.items()}
    return {"finding": finding.to_json(), "probes": probes}


def _suspects(finding: Finding) -> list[int]:
    """The culprits, or the loudest samples of the step if there are none."""
    if finding.positions:
        return list(finding.positions[:_MOST_SUSPECTS])
    rows = finding.numbers.get("first", {}).get("samples", {})
    return sorted(int(position) for position in _by_loudness(rows)[:_LOUDEST])


def _by_loudness(rows: Mapping[str, Sequence[float]]) -> list[str]:
    def loudness(position: str) -> float:
        _, loss, norm, _ = rows[position]
        return loss if math.isfinite(loss) and math.isfinite(norm) else math.inf

    return sorted(rows, key=lambda position: -loudness(position))


def _trimmed(probe: Any) -> Any:
    """The probe with only its loudest samples, if it has very many."""
    if not isinstance(probe, dict) or len(probe.get("samples", {})) <= _MOST_ROWS:
        return probe
    rows = probe["samples"]
    return probe | {"samples": {p: rows[p] for p in _by_loudness(rows)[:_MOST_ROWS]}}


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


def _oddities(tokens: Any, *, is_bytes: bool) -> list[str]:
    """Statistics of the tokens alone, and their text; ``is_bytes``: they are bytes of text."""
    ids = tokens.tolist()
    counts = Counter(ids)
    entropy = -sum(n / len(ids) * math.log2(n / len(ids)) for n in counts.values())
    grams = Counter(tuple(ids[start : start + _GRAM]) for start in range(len(ids) - _GRAM + 1))
    lines = [
        f"  {len(ids)} tokens, {len(counts)} different, {entropy:.2f} bits of entropy; the most "
        f"frequent run of {_GRAM} tokens occurs {max(grams.values(), default=0)} times"
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

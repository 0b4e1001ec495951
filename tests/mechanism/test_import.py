"""``python -m runner import``: weights of other programs, and files that mean harm."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runner.__main__ import main
from runner.checkpoint.disk.directory import CheckpointDirectory, Entry
from runner.checkpoint.disk.shards import verify_files
from runner.config.compose import compose
from runner.model.decoder import Decoder
from runner.session import parts
from runner.session.corpus import open_dataset
from tests.run import TINY, finish
from tests.stored import read_range

Weights = dict[str, torch.Tensor]
Import = Callable[..., tuple[int, str]]


@pytest.fixture
def import_(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Import:
    """The command in this process, into ``tmp_path/run``; gives exit code and what it said."""

    def run(source: Path, *arguments: str) -> tuple[int, str]:
        code = main(["import", str(source), f"out={tmp_path / 'run'}", *TINY, *arguments])
        told = capsys.readouterr()
        return code, " ".join((told.out + told.err).split())

    return run


def imported(tmp_path: Path) -> Entry:
    (entry,), damaged = CheckpointDirectory(tmp_path / "run" / "ring").entries()
    assert not damaged
    verify_files(entry, entry.manifest.files, finite=True)
    assert (entry.record.step, entry.record.cursor) == (0, 0)
    return entry


def whole(entry: Entry, name: str) -> torch.Tensor:
    shape = entry.manifest.shapes[name]
    return read_range(entry, name, 0, torch.Size(shape).numel()).view(shape)


def assert_holds(entry: Entry, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        assert torch.equal(whole(entry, name).view(torch.int32), tensor.view(torch.int32)), name


def params(weights: Mapping[str, torch.Tensor]) -> Weights:
    return {f"param/{name}": tensor for name, tensor in weights.items()}


def model() -> Decoder:
    config = compose(TINY)
    torch.manual_seed(5)
    return Decoder(parts.model_shape(config, open_dataset(config)))


@pytest.fixture
def weights() -> Weights:
    return {name: tensor.detach().clone() for name, tensor in model().named_parameters()}


def assert_nothing_left(tmp_path: Path) -> None:
    ring = tmp_path / "run" / "ring"
    assert not ring.exists() or not list(ring.iterdir())


# -- files --------------------------------------------------------------------------------


def prefixed(weights: Weights, prefix: str) -> Weights:
    return {f"{prefix}{name}": tensor for name, tensor in weights.items()}


def compiled(weights: Weights) -> Weights:
    return {n.replace(".attention.", "._orig_mod.attention."): t for n, t in weights.items()}


@pytest.mark.parametrize(
    "wrap",
    [
        dict,
        compiled,
        lambda weights: prefixed(weights, "module._orig_mod."),
        lambda weights: prefixed(weights, "_orig_mod.module.model."),
    ],
)
def test_names_in_the_usual_wrappings(
    wrap: Callable[[Weights], Weights], weights: Weights, import_: Import, tmp_path: Path
) -> None:
    save_file(wrap(weights), tmp_path / "w.safetensors")
    code, text = import_(tmp_path / "w.safetensors")
    assert code == 0, text
    assert_holds(imported(tmp_path), params(weights))


@pytest.mark.parametrize("frozen", ["[embedding]", pytest.param("[]", marks=pytest.mark.full)])
def test_a_run_trains_on_from_an_import(
    frozen: str, weights: Weights, import_: Import, tmp_path: Path
) -> None:
    settings = ("steps=3", "batch.global_size=8", "schedule.warmup=1", f"compute.frozen={frozen}")
    save_file(weights, tmp_path / "w.safetensors")
    assert import_(tmp_path / "w.safetensors", *settings)[0] == 0
    entry = imported(tmp_path)
    assert set(entry.manifest.update_counts.values()) == {0}
    is_trained = "exp_avg/embedding.weight" in entry.manifest.shapes
    assert is_trained == (frozen == "[]")
    run = finish(tmp_path / "run", *settings, ranks=0)
    last = CheckpointDirectory(run.out / "ring").entries()[0][-1]
    assert last.record.step == 3
    kept = torch.equal(whole(last, "param/embedding.weight"), weights["embedding.weight"])
    assert kept == (not is_trained)


def test_safetensors_of_one_file_in_bf16(weights: Weights, import_: Import, tmp_path: Path) -> None:
    half = {name: tensor.bfloat16() for name, tensor in weights.items()}
    save_file(half, tmp_path / "model.safetensors")
    assert import_(tmp_path / "model.safetensors")[0] == 0
    assert_holds(imported(tmp_path), params({n: t.float() for n, t in half.items()}))


def test_safetensors_of_several_files(weights: Weights, import_: Import, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    where = {n: f"model-{1 + i % 2}-of-2.safetensors" for i, n in enumerate(weights)}
    for file in set(where.values()):
        save_file({n: t for n, t in weights.items() if where[n] == file}, place / file)
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    save_file({"stray": torch.zeros(1)}, place / "other.safetensors")
    assert import_(place)[0] == 0
    assert_holds(imported(tmp_path), params(weights))


def test_an_index_cannot_lead_out(weights: Weights, import_: Import, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    save_file(weights, tmp_path / "w.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "../w.safetensors")}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    code, text = import_(place)
    assert (code, "leads out of the directory" in text) == (2, True), text


# -- names and fit ------------------------------------------------------------------------


def test_renames_in_their_order(weights: Weights, tmp_path: Path) -> None:
    other = {n.replace("blocks.", "layers.").replace("ffn", "mlp"): t for n, t in weights.items()}
    save_file(other | {"lm_head.weight": torch.zeros(2)}, tmp_path / "w.safetensors")
    renames = [r"^layers\.(\d+)=blocks.\1", "mlp=ffn", "^lm_head.weight$="]
    options = [word for text in renames for word in ("--rename", text, "seed=3")]
    code = main(
        ["import", str(tmp_path / "w.safetensors"), *options, f"out={tmp_path / 'run'}", *TINY]
    )
    assert code == 0
    assert_holds(imported(tmp_path), params(weights))


def without(weights: Weights, name: str) -> Weights:
    return {n: t for n, t in weights.items() if n != name}


NORM = "norm.weight"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda w: without(w, NORM), "missing: norm.weight"),
        (lambda w: w | {"extra": torch.zeros(2)}, "unexpected: extra"),
        (lambda w: w | {NORM: torch.zeros(31)}, "norm.weight [31], needed [32]"),
        (lambda w: prefixed(w, "net."), " more unexpected: net.blocks"),
        (lambda w: w | {NORM: torch.full((32,), float("nan"))}, "holds NaN or Inf"),
        (lambda w: w | {NORM: torch.full((32,), 1e300, dtype=torch.float64)}, "holds NaN or Inf"),
        (lambda w: w | {NORM: torch.zeros(32, dtype=torch.int64)}, "floating point"),
        (lambda w: w | {f"x.{NORM}": torch.zeros(32)}, "unexpected: x.norm.weight"),
        (lambda w: {}, "missing"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    spoil: Callable[[Weights], Weights],
    words: str,
    weights: Weights,
    import_: Import,
    tmp_path: Path,
) -> None:
    save_file(spoil(weights), tmp_path / "w.safetensors")
    code, text = import_(tmp_path / "w.safetensors")
    assert (code, words in text) == (2, True), text
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rename", "norm"), "REGEX=REPLACEMENT"),
        (("--rename", "(=x"), "--rename"),
        (("--rename", r"norm=\7"), "--rename"),
        (("--rename", "(query|key)=one"), "both called"),
        (("model.dim=64",), "needed"),
        (("modle.dim=64",), "unknown key"),
        (("--bogus",), "import --help"),
    ],
)
def test_arguments_that_cannot_work(
    arguments: tuple[str, ...], words: str, weights: Weights, import_: Import, tmp_path: Path
) -> None:
    save_file(weights, tmp_path / "w.safetensors")
    code, text = import_(tmp_path / "w.safetensors", *arguments)
    assert (code, words in text) == (2, True), text
    assert_nothing_left(tmp_path)


def test_a_run_that_is_there_stays_as_it_is(
    weights: Weights, import_: Import, tmp_path: Path
) -> None:
    save_file(weights, tmp_path / "w.safetensors")
    assert import_(tmp_path / "w.safetensors")[0] == 0
    before = imported(tmp_path).manifest
    code, text = import_(tmp_path / "w.safetensors")
    assert (code, "holds a run already" in text) == (2, True), text
    assert imported(tmp_path).manifest == before


def test_an_import_that_was_killed_is_begun_anew(
    weights: Weights, import_: Import, tmp_path: Path
) -> None:
    torn = tmp_path / "run" / "ring" / "writing-000001"
    torn.mkdir(parents=True)
    (torn / "rank-00000.bin").write_bytes(b"half")
    save_file(weights, tmp_path / "w.safetensors")
    assert import_(tmp_path / "w.safetensors")[0] == 0
    assert_holds(imported(tmp_path), params(weights))


def test_import_is_one_process(
    weights: Weights, import_: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(weights, tmp_path / "w.safetensors")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    code, text = import_(tmp_path / "w.safetensors")
    assert (code, "without torchrun" in text) == (2, True), text


@pytest.mark.parametrize("what", ["nothing", "empty"])
def test_no_source_there(what: str, import_: Import, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, text = import_(tmp_path / what)
    assert (code, "no such file or folder" in text) == (2, what == "nothing"), text


# -- harm ---------------------------------------------------------------------------------


class Touch:
    """Unpickled, this makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._path}",)


@pytest.mark.parametrize("name", ["w.pt", "w.bin", "w/pytorch_model.bin"])
def test_a_pickle_is_refused_unread(name: str, import_: Import, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    torch.save({"x": Touch(tmp_path / "harm")}, file)
    code, text = import_(tmp_path / Path(name).parts[0])
    assert (code, "safetensors.torch.save_file" in text) == (2, True), text
    assert not (tmp_path / "harm").exists()
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
def test_truncated_files_are_refused(
    share: float, weights: Weights, import_: Import, tmp_path: Path
) -> None:
    file = tmp_path / "w.safetensors"
    save_file(weights, file)
    os.truncate(file, int(file.stat().st_size * share))
    code, text = import_(file)
    assert (code, str(file) in text) == (2, True), text
    assert_nothing_left(tmp_path)

"""``python -m runner import``: weights of other programs, and files that mean harm."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed._mesh_layout import _MeshLayout

from runner.__main__ import main
from runner.checkpoint.disk.directory import CheckpointDirectory, Entry
from runner.checkpoint.disk.shards import read_range, verify_files
from runner.config.compose import compose
from runner.convert.sources import open_source
from runner.model.decoder import Decoder
from runner.policy.decision.skip_ledger import Ledger
from runner.session import parts
from runner.system.error import ConfigError
from tests import warm
from tests.run import TINY, finish

STAGES = ("zero1", "zero2", "zero3")
Weights = dict[str, torch.Tensor]

# Saves one checkpoint per stage, each with rank 0's own view of the FP32 state beside it.
DEEPSPEED_SCRIPT = """
    import os, sys
    from pathlib import Path
    import torch
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from runner.session import parts
    from runner.config.compose import compose
    from runner.model.decoder import Decoder

    out, overrides = Path(sys.argv[1]), sys.argv[2:]
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # minutes of compiling
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    config = compose(overrides)
    shape = parts.model_shape(config, parts.open_dataset(config))
    for stage in (1, 2, 3):
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        if stage == 1:  # the optimizer class that our own engine gets
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
        torch.manual_seed(stage)
        if stage == 3:
            with deepspeed.zero.Init(config_dict_or_path=settings):
                model = Decoder(shape)
        else:
            model = Decoder(shape)
        parameters = dict(model.named_parameters())
        flat = [p for n, p in parameters.items() if "norm" in n]
        rest = [p for n, p in parameters.items() if "norm" not in n]
        optimizer = torch.optim.AdamW(
            [{"params": rest, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}], lr=1e-3
        )
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            tokens = torch.randint(0, 64, (2, 17), generator=generator)
            logits = engine(tokens[:, :-1]).float().flatten(0, 1)
            engine.backward(torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))
            engine.step()
        engine.save_checkpoint(str(out / f"zero{stage}"))
        truth = {}
        for name, parameter in parameters.items():
            truth[f"param/{name}"] = safe_get_full_fp32_param(parameter).detach().clone()
            for kind in ("exp_avg", "exp_avg_sq") if stage != 2 else ():
                whole = safe_get_full_optimizer_state(parameter, kind)
                truth[f"{kind}/{name}"] = whole.detach().clone()
        if rank == 0:
            torch.save(truth, out / f"zero{stage}.pt")
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads do not always survive the end of the interpreter
"""


@pytest.fixture(scope="module")
def deepspeed_places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with DeepSpeed's zero1, zero2, zero3 of two ranks, and zeroN.pt: what is in them."""
    return saved_by_two_ranks(DEEPSPEED_SCRIPT, tmp_path_factory.mktemp("deepspeed"))


def saved_by_two_ranks(program: str, out: Path) -> Path:
    """Run ``program`` on two ranks, told ``out`` and the settings."""
    script = out / "save.py"
    script.write_text(textwrap.dedent(program))
    zero = "deepspeed" in program
    done = warm.torchrun([str(script), str(out), *TINY], ranks=2, timeout=120, zero=zero)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture
def deepspeed_copy(deepspeed_places: Path, tmp_path: Path) -> Path:
    """A zero2 checkpoint that a test may spoil."""
    return Path(shutil.copytree(deepspeed_places / "zero2", tmp_path / "copy"))


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
    return Decoder(parts.model_shape(config, parts.open_dataset(config)))


@pytest.fixture
def weights() -> Weights:
    return {name: tensor.detach().clone() for name, tensor in model().named_parameters()}


def assert_nothing_left(tmp_path: Path) -> None:
    ring = tmp_path / "run" / "ring"
    assert not ring.exists() or not list(ring.iterdir())


# -- DeepSpeed ----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_masters_of_deepspeed_come_bit_for_bit(
    stage: str, deepspeed_places: Path, import_: Import, tmp_path: Path
) -> None:
    code, text = import_(deepspeed_places / stage)
    assert code == 0, text
    assert "FP32 masters" in text
    entry, truth = imported(tmp_path), torch.load(deepspeed_places / f"{stage}.pt")
    assert {f"param/{name}" for name in entry.manifest.update_counts} == {
        name for name in truth if name.startswith("param/")
    }
    assert_holds(entry, {n: t for n, t in truth.items() if n.startswith("param/")})
    assert set(entry.manifest.update_counts.values()) == {0}
    assert not whole(entry, "exp_avg/embedding.weight").any()


@pytest.mark.parametrize("stage", STAGES)
def test_moments_of_deepspeed_come_when_asked_for(
    stage: str, deepspeed_places: Path, import_: Import, tmp_path: Path
) -> None:
    (tag,) = deepspeed_places.glob(f"{stage}/global_step*")
    assert import_(tag, "--moments")[0] == 0
    entry = imported(tmp_path)
    assert_holds(entry, torch.load(deepspeed_places / f"{stage}.pt"))
    assert set(entry.manifest.update_counts.values()) == {3}
    for name in entry.manifest.update_counts:
        assert (whole(entry, f"exp_avg_sq/{name}") > 0).any(), name


def test_without_optimizer_files_the_module_is_taken(
    deepspeed_copy: Path, deepspeed_places: Path, import_: Import, tmp_path: Path
) -> None:
    for path in deepspeed_copy.glob("*/*_optim_states.pt"):
        path.unlink()
    code, text = import_(deepspeed_copy)
    assert (code, "module weights" in text) == (0, True)
    truth = torch.load(deepspeed_places / "zero2.pt")
    name = "param/embedding.weight"
    assert torch.equal(whole(imported(tmp_path), name), truth[name].bfloat16().float())


def test_a_run_trains_on_from_an_import(
    deepspeed_places: Path, import_: Import, tmp_path: Path
) -> None:
    settings = ("steps=3", "batch.global_size=8", "schedule.warmup=1")
    assert import_(deepspeed_places / "zero3", *settings)[0] == 0
    result = finish(tmp_path / "run", *settings, ranks=0)
    assert sorted(result.counted()) == [1, 2, 3]
    expected = source_loss(deepspeed_places / "zero3.pt", settings)
    # The default weights of torch: a loss far from that of a fresh model, ln(64) = 4.16.
    assert expected > 5
    assert result.counted()[1]["loss"] == pytest.approx(expected, rel=0.01)


def test_what_is_not_to_be_trained_comes_without_moments(
    dcp_place: Path, weights: Weights, import_: Import, tmp_path: Path
) -> None:
    settings = ("model.frozen=[embedding]", "steps=3", "batch.global_size=8", "schedule.warmup=1")
    assert import_(dcp_place, "--moments", *settings)[0] == 0
    entry = imported(tmp_path)
    assert "param/embedding.weight" in entry.manifest.shapes
    assert "exp_avg/embedding.weight" not in entry.manifest.shapes
    assert "embedding.weight" not in entry.manifest.update_counts
    assert "exp_avg/norm.weight" in entry.manifest.shapes
    run = finish(tmp_path / "run", *settings, ranks=0)
    last = CheckpointDirectory(run.out / "ring").entries()[0][-1]
    assert last.record.step == 3
    assert_holds(last, params({"embedding.weight": weights["embedding.weight"]}))
    assert not torch.equal(whole(last, "param/norm.weight"), weights["norm.weight"])


def source_loss(truth: Path, settings: tuple[str, ...]) -> float:
    """FP32 loss of the saved model on the run's first batch."""
    config = compose([*TINY, *settings])
    dataset = parts.open_dataset(config)
    stream = parts.sample_stream(config, dataset)
    plan = stream.plan(0, Ledger())
    rows = torch.stack(
        [torch.as_tensor(dataset[int(i)].tokens).long() for i in stream.indices(plan.positions)]
    )
    made = model()
    saved = torch.load(truth)
    made.load_state_dict({name: saved[f"param/{name}"] for name in made.state_dict()})
    with torch.no_grad():
        logits = made(rows[:, :-1])
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


# -- DCP ----------------------------------------------------------------------------------


@pytest.fixture
def dcp_place(tmp_path: Path, weights: Weights) -> Path:
    state = {
        f"state.{name}.{kind}": value
        for name, tensor in weights.items()
        for kind, value in (
            ("exp_avg", tensor * 0.5),
            ("exp_avg_sq", tensor.square()),
            ("step", torch.tensor(7.0)),
        )
    }
    optimizer = {**state, "param_groups.0.lr": 1e-3}
    dcp.save({"model": weights, "optimizer": optimizer}, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


def test_a_dcp_directory_comes_with_its_moments(
    dcp_place: Path, weights: Weights, import_: Import, tmp_path: Path
) -> None:
    code, text = import_(dcp_place, "--moments")
    assert code == 0, text
    entry = imported(tmp_path)
    assert_holds(entry, params(weights))
    assert_holds(entry, {f"exp_avg/{name}": tensor * 0.5 for name, tensor in weights.items()})
    assert_holds(entry, {f"exp_avg_sq/{name}": t.square() for name, t in weights.items()})
    assert set(entry.manifest.update_counts.values()) == {7}


def test_a_flat_dcp_directory(weights: Weights, import_: Import, tmp_path: Path) -> None:
    dcp.save(dict(weights), checkpoint_id=tmp_path / "dcp")
    assert import_(tmp_path / "dcp")[0] == 0
    assert_holds(imported(tmp_path), params(weights))


# Saves a FSDP2 training of two ranks as torch's tutorials do, with the whole tensors beside it.
DCP_SCRIPT = """
    import os, sys
    from pathlib import Path
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.checkpoint.stateful import Stateful
    from torch.distributed.fsdp import fully_shard
    from runner.session import parts
    from runner.config.compose import compose
    from runner.model.decoder import Decoder

    class App(Stateful):
        def state_dict(self):
            weights, state = get_state_dict(model, optimizer)
            return {"model": weights, "optim": state}

        def load_state_dict(self, state):
            raise NotImplementedError

    out, overrides = Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("gloo")
    config = compose(overrides)
    torch.manual_seed(3)
    model = Decoder(parts.model_shape(config, parts.open_dataset(config)))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        tokens = torch.randint(0, 64, (2, 17))
        logits = model(tokens[:, :-1]).float().flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    app = App()
    dcp.save({"app": app}, checkpoint_id=out / "app")
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=out / "plain")
    dcp.save({"model": weights}, checkpoint_id=out / "weights")
    whole = StateDictOptions(full_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=whole)
    truth = {f"param/{name}": tensor for name, tensor in weights.items()}
    for name, of_one in state["state"].items():
        truth |= {f"{kind}/{name}": of_one[kind] for kind in ("exp_avg", "exp_avg_sq")}
    if dist.get_rank() == 0:
        torch.save(truth, out / "truth.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads do not always survive the end of the interpreter
"""


@pytest.fixture(scope="module")
def dcp_places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with torch's own app, plain, weights of two ranks, and truth.pt."""
    return saved_by_two_ranks(DCP_SCRIPT, tmp_path_factory.mktemp("dcp"))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["app", "plain"])
def test_a_dcp_directory_of_two_fsdp_ranks_comes_bit_for_bit(
    layout: str, dcp_places: Path, import_: Import, tmp_path: Path
) -> None:
    assert len(list((dcp_places / layout).glob("*.distcp"))) == 2
    code, text = import_(dcp_places / layout, "--moments")
    assert code == 0, text
    entry = imported(tmp_path)
    truth = torch.load(dcp_places / "truth.pt")
    assert truth.keys() == entry.manifest.shapes.keys()
    assert_holds(entry, truth)
    assert set(entry.manifest.update_counts.values()) == {3}


def test_a_dcp_directory_of_weights_alone(
    dcp_places: Path, import_: Import, tmp_path: Path
) -> None:
    code, text = import_(dcp_places / "weights")
    assert code == 0, text
    truth = torch.load(dcp_places / "truth.pt")
    assert_holds(imported(tmp_path), {n: t for n, t in truth.items() if n.startswith("param/")})


@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("zero3", marks=pytest.mark.full)])
def test_a_run_on_two_ranks_trains_on_from_a_dcp_directory(
    parallel: str, dcp_places: Path, import_: Import, tmp_path: Path
) -> None:
    settings = ("steps=3", "batch.global_size=8", "schedule.warmup=1", f"parallel={parallel}")
    settings += ("model.precision=bf16",)
    assert import_(dcp_places / "app", "--moments", *settings)[0] == 0
    run = finish(tmp_path / "run", *settings)
    expected = source_loss(dcp_places / "truth.pt", settings)
    assert run.counted()[1]["loss"] == pytest.approx(expected, rel=0.01)
    assert set(
        CheckpointDirectory(run.out / "ring").entries()[0][-1].manifest.update_counts.values()
    ) == {6}


def edit_metadata(place: Path, change: Callable[[Any], None]) -> None:
    metadata = dcp.FileSystemReader(place).read_metadata()
    change(metadata)
    (place / ".metadata").write_bytes(pickle.dumps(metadata))


def change_info(**values: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        index = next(i for i in metadata.storage_data if i.fqn == "model.embedding.weight")
        metadata.storage_data[index] = replace(metadata.storage_data[index], **values)

    return change


def grow_tensor(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["model.embedding.weight"]
    entry.size = torch.Size([128, 32])


def double_chunk(metadata: Any) -> None:
    """Two chunks in the same place, of as many elements as the tensor has."""
    entry = metadata.state_dict_metadata["model.embedding.weight"]
    half = replace(entry.chunks[0], sizes=torch.Size([32, 32]))
    entry.chunks = [half, half]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_info(relative_path="../secret"), "leads out of the directory"),
        (change_info(relative_path="/etc/passwd"), "leads out of the directory"),
        (change_info(relative_path="link"), "leads out of the directory"),
        (change_info(relative_path="nothing"), "is not there"),
        (change_info(offset=1 << 40), "truncated"),
        (change_info(offset=-5), "truncated"),
        (change_info(length=1 << 50), "truncated"),
        (change_info(length=100), "a chunk of [64, 32] in 100 bytes"),
        (change_info(length=5000), "cannot be imported"),
        (change_info(transform_descriptors=["zstd"]), "compressed"),
        (grow_tensor, "missing or doubled"),
        (double_chunk, "the metadata says"),
    ],
)
def test_metadata_that_does_not_add_up_is_refused(
    change: Callable[[Any], None],
    words: str,
    dcp_place: Path,
    import_: Import,
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 4096)
    (dcp_place / "link").symlink_to(tmp_path / "secret")
    edit_metadata(dcp_place, change)
    code, text = import_(dcp_place)
    assert (code, words in text) == (2, True), text
    assert_nothing_left(tmp_path)


# -- files --------------------------------------------------------------------------------


def prefixed(weights: Weights, prefix: str) -> Weights:
    return {f"{prefix}{name}": tensor for name, tensor in weights.items()}


def compiled(weights: Weights) -> Weights:
    return {n.replace(".attention.", "._orig_mod.attention."): t for n, t in weights.items()}


@pytest.mark.parametrize(
    "wrap",
    [
        dict,
        OrderedDict,
        compiled,
        lambda weights: {"model": weights, "step": 3},
        lambda weights: {"state_dict": prefixed(weights, "module."), "epoch": 1},
        lambda weights: prefixed(weights, "module._orig_mod."),
        lambda weights: prefixed(weights, "_orig_mod.module.model."),
        lambda weights: {n: torch.nn.Parameter(t) for n, t in weights.items()},
    ],
)
def test_a_torch_file_in_the_usual_wrappings(
    wrap: Callable[[Weights], Any], weights: Weights, import_: Import, tmp_path: Path
) -> None:
    torch.save(wrap(weights), tmp_path / "weights.bin")
    code, text = import_(tmp_path / "weights.bin")
    assert code == 0, text
    assert_holds(imported(tmp_path), params(weights))


def test_an_old_torch_file(weights: Weights, import_: Import, tmp_path: Path) -> None:
    torch.save(weights, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    assert import_(tmp_path / "w.pt")[0] == 0
    assert_holds(imported(tmp_path), params(weights))


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
    torch.save(other | {"lm_head.weight": torch.zeros(2)}, tmp_path / "w.pt")
    renames = [r"^layers\.(\d+)=blocks.\1", "mlp=ffn", "^lm_head.weight$="]
    options = [word for text in renames for word in ("--rename", text, "seed=3")]
    code = main(["import", str(tmp_path / "w.pt"), *options, f"out={tmp_path / 'run'}", *TINY])
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
        (lambda w: w | {NORM: torch.zeros(32).to_sparse()}, "dense"),
        (lambda w: w | {NORM: torch.zeros(32, device="meta")}, "dense"),
        (lambda w: w | {NORM: torch.zeros(1).expand(32)}, "more elements than are stored"),
        (lambda w: w | {NORM: "text"}, "a str"),
        (lambda w: w | {f"x.{NORM}": torch.zeros(32)}, "unexpected: x.norm.weight"),
        (lambda w: list(w.values()), "not a mapping"),
        (lambda w: {}, "missing"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    spoil: Callable[[Weights], Any],
    words: str,
    weights: Weights,
    import_: Import,
    tmp_path: Path,
) -> None:
    torch.save(spoil(weights), tmp_path / "w.pt")
    code, text = import_(tmp_path / "w.pt")
    assert (code, words in text) == (2, True), text
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--moments",), "no readable moments"),
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
    torch.save(weights, tmp_path / "w.pt")
    code, text = import_(tmp_path / "w.pt", *arguments)
    assert (code, words in text) == (2, True), text
    assert_nothing_left(tmp_path)


def test_a_run_that_is_there_stays_as_it_is(
    weights: Weights, import_: Import, tmp_path: Path
) -> None:
    torch.save(weights, tmp_path / "w.pt")
    assert import_(tmp_path / "w.pt")[0] == 0
    before = imported(tmp_path).manifest
    code, text = import_(tmp_path / "w.pt")
    assert (code, "holds a run already" in text) == (2, True), text
    assert imported(tmp_path).manifest == before


def test_an_import_that_was_killed_is_begun_anew(
    weights: Weights, import_: Import, tmp_path: Path
) -> None:
    torn = tmp_path / "run" / "ring" / "writing-000001"
    torn.mkdir(parents=True)
    (torn / "rank-00000.bin").write_bytes(b"half")
    torch.save(weights, tmp_path / "w.pt")
    assert import_(tmp_path / "w.pt")[0] == 0
    assert_holds(imported(tmp_path), params(weights))


def test_what_torch_has_registered_as_loadable_stays_registered(tmp_path: Path) -> None:
    before = set(torch.serialization.get_safe_globals())
    torch.save({"x": torch.zeros(1)}, tmp_path / "w.pt")
    open_source(tmp_path / "w.pt")
    assert before and set(torch.serialization.get_safe_globals()) == before


def test_import_is_one_process(
    weights: Weights, import_: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(weights, tmp_path / "w.pt")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    code, text = import_(tmp_path / "w.pt")
    assert (code, "without torchrun" in text) == (2, True), text


@pytest.mark.parametrize("what", ["nothing", "empty"])
def test_no_source_there(what: str, import_: Import, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert import_(tmp_path / what)[0] == 2


# -- harm ---------------------------------------------------------------------------------


class Touch:
    """Unpickled without care, this makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._path}",)


class Starts:
    """Starts a process without os.system."""

    def __reduce__(self) -> tuple[Any, ...]:
        return subprocess.Popen, (["true"],)


def spoil_torch(place: Path, evil: object) -> Path:
    torch.save({"model": {"x": evil}}, place / "w.pt")
    return place / "w.pt"


def spoil_old_torch(place: Path, evil: object) -> Path:
    torch.save({"x": evil}, place / "w.pt", _use_new_zipfile_serialization=False)
    return place / "w.pt"


def spoil_bare_pickle(place: Path, evil: object) -> Path:
    (place / "w.bin").write_bytes(pickle.dumps(evil))
    return place / "w.bin"


def spoil_metadata(place: Path, evil: object) -> Path:
    dcp.save({"x": torch.zeros(2)}, checkpoint_id=place / "dcp")
    (place / "dcp" / ".metadata").write_bytes(pickle.dumps({"x": evil}))
    return place / "dcp"


def spoil_distcp(place: Path, evil: object) -> Path:
    """The metadata is sound, the tensor's bytes are not."""
    dcp.save(
        {name: torch.zeros_like(t) for name, t in model().named_parameters()},
        checkpoint_id=place / "dcp",
    )
    data = place / "dcp" / "__0_0.distcp"
    torch.save([evil, torch.zeros(4096)], data)  # of a size that can hold what is promised
    size = data.stat().st_size
    metadata = dcp.FileSystemReader(place / "dcp").read_metadata()
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(info, offset=0, length=size)
    (place / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    return place / "dcp"


SPOILERS = [spoil_torch, spoil_old_torch, spoil_bare_pickle, spoil_metadata, spoil_distcp]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_a_pickle_that_runs_a_command_is_refused_by_name(
    spoil: Callable[[Path, object], Path], import_: Import, tmp_path: Path
) -> None:
    source = spoil(tmp_path, Touch(tmp_path / "harm"))
    code, text = import_(source)
    # Of a bare pickle of a newer protocol torch does not say what it met.
    words = "more than tensors" if spoil is spoil_bare_pickle else "posix.system"
    assert (code, words in text, str(source) in text) == (2, True, True), text
    assert "weights_only" not in text
    assert not (tmp_path / "harm").exists()
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("spoil", [spoil_torch, spoil_metadata])
@pytest.mark.parametrize(
    ("evil", "names"),
    [
        (Starts(), ("subprocess.Popen", "commands.Popen")),
        (getattr, ("getattr",)),
        (Path.cwd, ("getattr",)),
        (slice(1), ("slice",)),
        (torch.load, ("torch.serialization.load",)),
        (dcp.FileSystemReader, ("torch.distributed.checkpoint.filesystem.FileSystemReader",)),
        # torch has it registered as loadable; no source needs it
        (_MeshLayout, ("torch.distributed._mesh_layout._MeshLayout",)),
    ],
)
def test_other_globals_are_refused_too(
    spoil: Callable[[Path, object], Path],
    evil: object,
    names: tuple[str, ...],
    import_: Import,
    tmp_path: Path,
) -> None:
    code, text = import_(spoil(tmp_path, evil))
    assert code == 2, text
    said = text.replace(" __builtin__.", " ").replace(" builtins.", " ")
    assert any(f"names the global {name}," in said for name in names), text


@pytest.mark.parametrize("pattern", ["*/mp_rank_00_model_states.pt", "*/*rank_1*_optim_states.pt"])
def test_a_deepspeed_file_that_means_harm_is_refused(
    pattern: str, deepspeed_copy: Path, import_: Import, tmp_path: Path
) -> None:
    (file,) = deepspeed_copy.glob(pattern)
    tree = torch.load(file, weights_only=False)
    torch.save({**tree, "x": Touch(tmp_path / "harm")}, file)
    code, text = import_(deepspeed_copy)
    assert (code, "posix.system" in text, str(file) in text) == (2, True, True), text
    assert not (tmp_path / "harm").exists()
    assert_nothing_left(tmp_path)


def test_reading_imports_no_deepspeed(deepspeed_places: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\nfrom runner.convert.sources import open_source\n"
        f"open_source(Path({str(deepspeed_places / 'zero2')!r}))\n"
        "sys.exit('deepspeed' in sys.modules)\n"
    )
    done = warm.finished([sys.executable, str(program)], timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_latest_that_leads_out_is_refused(deepspeed_copy: Path) -> None:
    for name in ("../copy/global_step3", "..", "/etc", "", "nothing"):
        (deepspeed_copy / "latest").write_text(name)
        with pytest.raises(ConfigError, match="latest"):
            open_source(deepspeed_copy)


def test_a_missing_rank_is_noticed(deepspeed_copy: Path, import_: Import) -> None:
    (file,) = deepspeed_copy.glob("*/*rank_1*_optim_states.pt")
    file.unlink()
    code, text = import_(deepspeed_copy)
    assert (code, "it was saved by 2" in text) == (2, True), text


def cut(path: Path, share: float) -> None:
    os.truncate(path, int(path.stat().st_size * share))


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("kind", ["torch", "old", "safetensors", "metadata", "distcp", "deepspeed"])
def test_truncated_files_are_refused(
    kind: str,
    share: float,
    weights: Weights,
    dcp_place: Path,
    deepspeed_copy: Path,
    import_: Import,
    tmp_path: Path,
) -> None:
    torch.save(weights, tmp_path / "w.pt")
    torch.save(weights, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(weights, tmp_path / "w.safetensors")
    source, file = {
        "torch": (tmp_path / "w.pt", tmp_path / "w.pt"),
        "old": (tmp_path / "old.pt", tmp_path / "old.pt"),
        "safetensors": (tmp_path / "w.safetensors", tmp_path / "w.safetensors"),
        "metadata": (dcp_place, dcp_place / ".metadata"),
        "distcp": (dcp_place, dcp_place / "__0_0.distcp"),
        "deepspeed": (deepspeed_copy, next(deepspeed_copy.glob("*/*rank_0*_optim_states.pt"))),
    }[kind]
    cut(file, share)
    code, text = import_(source)
    assert (code, str(file.parent) in text) == (2, True), text
    assert_nothing_left(tmp_path)


def test_help_names_the_options(import_: Import, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["import", "--help"])
    assert "--rename" in capsys.readouterr().out

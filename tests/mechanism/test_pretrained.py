"""``model=hf``: a network and its weights from a folder, in one process."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runner.command.export import Output
from runner.command.export_hf import _Model
from runner.command.plan_memory import planned_memory
from runner.config.compose import compose
from runner.config.schema import RunConfig
from runner.config.validate import check
from runner.convert import weights as stored_module
from runner.data.feed import MicroBatch
from runner.distributed.env import place_from
from runner.engine.protocol import Engine, MicroStep
from runner.model.pretrained import PretrainedBlueprint, positions_within, stored_layout
from runner.model.quantised import quantised_layers
from runner.run_dir.paths import RunDir
from runner.session import parts
from runner.session.corpus import open_dataset
from runner.startup.memory_need import MemoryNeed
from runner.system.error import ConfigError
from tests import hf_folder
from tests.rows import full

pytestmark = pytest.mark.usefixtures("alone")

pytest.importorskip("transformers")
CPU = torch.device("cpu")
ALONE = place_from({})
LORA = "model.lora={r: 2, targets: [q_proj, v_proj], alpha: 8}"
VOCAB = len(hf_folder.LETTERS)


def quantised(**told: Any) -> dict[str, Any]:
    """More of a ``config.json``."""
    return {"quantization_config": told}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In several files."""
    return hf_folder.llama(tmp_path_factory.mktemp("llama"), shard="20KB")


def settings(folder: Path, *more: str) -> RunConfig:
    told = ["model=hf", f"model.path={folder}", "data=synthetic", f"data.vocab_size={VOCAB}"]
    told += ["data.seq_len=24", "compute.precision=fp32", *more]
    config = compose(told)
    check(config, world_size=1)
    return config


def blueprint(folder: Path, *more: str) -> PretrainedBlueprint:
    config = settings(folder, *more)
    made = parts.blueprint(config, open_dataset(config))
    assert isinstance(made, PretrainedBlueprint)
    return made


def build(folder: Path, *more: str) -> Engine:
    return parts.engine(settings(folder, *more), blueprint(folder, *more), ALONE, CPU)


def logits(folder: Path, tokens: Tensor, *more: str) -> Tensor:
    """Of the network with the engine's weights, gathered."""
    made = blueprint(folder, *more)
    engine = parts.engine(settings(folder, *more), made, ALONE, CPU)
    network = made.made()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(engine.full(f"param/{name}"))
        return network.eval()(tokens).logits


def losses(engine: Engine, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
    batch = MicroBatch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        segments=segments,
        positions=tuple(range(len(tokens))),
    )
    engine.accumulate([MicroStep(batch=batch, seed=0)])
    sums = engine._forward.sums([]).sequences.losses[0].clone()  # type: ignore[attr-defined]
    engine.apply(skip=torch.ones(()), grad_scale=torch.ones(()), learning_rate=0.0)
    return sums


def test_weights_of_a_folder_give_its_logits(folder: Path) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 2
    expected = hf_folder.loaded(folder)(hf_folder.ids()).logits
    torch.testing.assert_close(logits(folder, hf_folder.ids()), expected)
    torch.testing.assert_close(logits(folder, hf_folder.ids(), LORA), expected)
    trained = set(build(folder, LORA).update_counts())
    assert len(trained) == 8 and all(".lora_" in name for name in trained)


@pytest.mark.full
def test_a_tied_head_and_weights_the_other_way_round(tmp_path: Path) -> None:
    place = hf_folder.gpt2(tmp_path / "gpt2")
    expected = hf_folder.loaded(place)(hf_folder.ids()).logits
    torch.testing.assert_close(logits(place, hf_folder.ids()), expected)
    # As the files of the inner model alone have them.
    weights = load_file(place / "model.safetensors")
    inner = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    save_file(inner, place / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(logits(place, hf_folder.ids()), expected)


def test_a_rank_reads_its_rows_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = blueprint(folder)
    whole = load_file(next(p for p in folder.glob("*.safetensors") if "lm_head" in str(heads(p))))
    name, read = "lm_head.weight", []

    class Watched:
        """Notes which rows are asked of a file."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getitem__(self, rows: slice) -> Tensor:
            found = self._inner[rows]
            read.append(found.shape[0])
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    real = stored_module.safe_open

    class Opened:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._context = real(*args, **kwargs)

        def __enter__(self) -> Opened:
            self._file = self._context.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self._context.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def get_slice(self, name: str) -> Watched:
            return Watched(self._file.get_slice(name))

    monkeypatch.setattr(stored_module, "safe_open", Opened)
    part = made.initial(0, name, (VOCAB, 32), 5 * 32 + 7, 64)
    assert torch.equal(part, whole[name].flatten()[5 * 32 + 7 :][:64]) and read == [3]
    assert made.initial(0, name, (VOCAB, 32), 0, 0).numel() == 0 and read == [3]


def heads(path: Path) -> list[str]:
    return list(load_file(path))


def test_random_weights_need_a_config_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    fresh, again = (logits(tmp_path, hf_folder.ids(), "model.init=random") for _ in range(2))
    assert not torch.equal(fresh, logits(folder, hf_folder.ids()))
    assert torch.equal(fresh, again)


def test_documents_in_one_window_do_not_see_each_other(folder: Path) -> None:
    tokens = hf_folder.ids(2, 25)
    segments = torch.zeros(2, 24, dtype=torch.int32)
    segments[:, 10:] = 1
    assert positions_within(segments)[0].tolist() == [*range(10), *range(14)]
    engine = build(folder)
    # Of the second document: alone, behind another one, and behind it without the mask.
    tokens[:, 10] = tokens[:, 11]
    alone = losses(engine, tokens[:, 10:])
    for first in (tokens, tokens.flip(0)):
        both = torch.cat([first[:, :10], tokens[:, 10:]], dim=1)
        packed = losses(engine, both, segments)
        before = losses(engine, both[:, :11])
        torch.testing.assert_close(packed - before, alone, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(losses(engine, both) - before, alone, rtol=1e-3)


def test_recomputed_activations_give_the_same_step(folder: Path) -> None:
    tokens = hf_folder.ids(2, 25)
    plain, recomputed = build(folder), build(folder, "compute.recompute=blocks")
    assert torch.equal(losses(plain, tokens), losses(recomputed, tokens))
    layer = recomputed.network.model.layers[0]  # type: ignore[attr-defined]
    assert layer.gradient_checkpointing


def changed(folder: Path, target: Path, **more: Any) -> Path:
    """A copy with other settings."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    tree = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**tree, **more}))
    return target


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"num_hidden_layers": 3}, "missing: model.layers.2.self_attn.q_proj.weight; "),
        ({"num_hidden_layers": 1}, "unexpected: model.layers.1.input_layernorm.weight; "),
        ({"intermediate_size": 48}, "gate_proj.weight [64, 32], needed [48, 32]"),
        (quantised(quant_method="fp8"), "(quant_method=fp8); quantised weights cannot be trained"),
        (quantised(quant_method="gptq", bits=4), "(quant_method=gptq, bits=4); quantised weights"),
        (quantised(quant_method="awq", bits=4), "with model.quantize=nf4, fp4 or int8"),
        (quantised(quant_method="torchao", quant_type="int8_weight_only"), "or, of int8, load it"),
        (quantised(quant_method="bitsandbytes", load_in_4bit=True), "or load it in a loop of your"),
        (quantised(), "(without quant_method)"),
        ({"model_type": "nothing"}, "config.json ValueError: The checkpoint you are trying"),
        ({"model_type": "vit"}, "which transformers has no decoder for"),
        ({"max_position_embeddings": 16}, "data.seq_len=24: the model"),
        ({"vocab_size": 8}, "its embedding has 8 rows, and the data 42 token ids"),
    ],
)
def test_what_does_not_fit_is_told_with_names(
    folder: Path, tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    place = changed(folder, tmp_path / "changed", **more)
    with pytest.raises(ConfigError) as error:
        build(place)
    assert words in str(error.value) and str(place) in str(error.value), str(error.value)


def test_files_that_cannot_be_trusted_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"has no \*.safetensors; put"):
        build(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pytorch_model.bin only, a pickled file, which can run"):
        build(tmp_path)
    whole = {}
    for path in folder.glob("*.safetensors"):
        whole |= load_file(path)
    ill = {**whole, "model.norm.weight": whole["model.norm.weight"] * float("nan")}
    save_file(ill, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'model.norm.weight' holds NaN or Inf"):
        build(tmp_path)
    save_file({**whole, "model.norm.weight": torch.ones(32).char()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'model.norm.weight' is I8; weights must be one of"):
        build(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read"):
        build(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff{", b"[" * 100_000, b" " * (5 << 20)])
def test_a_config_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config.json: (no readable|a) JSON"):
        build(tmp_path)


def test_code_in_a_folder_is_never_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the error has the path more than once, and is cut
    remote = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    place = changed(folder, Path("remote"), model_type="own", auto_map=remote)
    (place / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        build(place)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("model.lora={r: 2}",), "targets must be a list"),
        (("model.lora={r: 0, targets: all-linear}",), "r must be a whole number from 1"),
        (("model.lora={rank: 2}",), "rank is not known; these are: r, targets"),
        (("model.lora={r: 2, targets: [wq]}",), "layers that can be adapted end with down_proj, "),
        (("model.dim=64",), "model.dim=64: is a decoder setting"),
        (("model.init=zeros",), "must be weights or random"),
        (("model.path=null",), "needs model.path"),
        (("model.path=/nowhere",), "has no config.json"),
    ],
)
def test_settings_that_cannot_be_meant(folder: Path, more: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(folder, *more)
    assert words in str(error.value), str(error.value)


def test_two_types_of_what_is_trained_are_refused_for_zero3() -> None:
    from runner.engine.zero import _check_types

    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    _check_types(module)
    module[1].bfloat16()
    with pytest.raises(ConfigError, match=r"1.weight torch.bfloat16; trained parameters must have"):
        _check_types(module)


def test_files_may_have_names_of_an_older_release(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    assert "embed_out.weight" in load_file(tmp_path / "model.safetensors")
    expected = hf_folder.loaded(tmp_path)(hf_folder.ids()).logits
    torch.testing.assert_close(logits(tmp_path, hf_folder.ids()), expected)


def experts_of(kind: str, folder: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind, vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=0, sliding_window=None, moe_intermediate_size=12,
        num_local_experts=3, num_experts=3, num_experts_per_tok=2, initializer_range=0.2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["mixtral", full("qwen3_moe")])
def test_experts_that_are_stored_one_by_one_are_read_a_range_at_a_time_and_written_again(
    tmp_path: Path, kind: str
) -> None:
    stored = load_file(experts_of(kind, tmp_path) / "model.safetensors")
    assert sum(".experts." in name for name in stored) == 2 * 3 * 3
    expected = hf_folder.loaded(tmp_path)(hf_folder.ids()).logits
    torch.testing.assert_close(logits(tmp_path, hf_folder.ids()), expected)
    network = blueprint(tmp_path)
    name = next(name for name in network.parameters() if name.endswith("gate_up_proj"))
    shape = network.parameters()[name].shape
    whole = network.initial(0, name, shape, 0, math.prod(shape))
    assert torch.equal(network.initial(0, name, shape, 100, 450), whole[100:550])
    model = _Model(RunDir(tmp_path / "none"), str(tmp_path), None)
    written: dict[str, Tensor] = {}
    for name, one in network.parameters().items():
        value = network.initial(0, name, one.shape, 0, math.prod(one.shape)).view(one.shape)
        outputs = model.experts(name, one.shape) or {model.stored_name(name): Output(one.shape)}
        written |= {
            own: output.make(lambda _, value=value: value, "") for own, output in outputs.items()
        }
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored)
    del stored[next(name for name in stored if ".experts.1." in name)]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"missing: .*(gate_up|down)_proj"):
        build(tmp_path)


def test_tensors_that_are_changed_otherwise_when_they_are_loaded_are_refused() -> None:
    split = SimpleNamespace(
        source_patterns=["qkv"],
        target_patterns=["q", "k", "v"],
        operations=[SimpleNamespace(dim=0)],
    )
    with pytest.raises(ConfigError, match="model_type=odd in another layout on disk than in"):
        stored_layout([split], "odd")


def test_the_folders_tokenizer_is_taken(folder: Path, tmp_path: Path) -> None:
    hf_folder.tokenizer(tmp_path)
    told = ["model=hf", f"model.path={tmp_path}", "data=hf"]
    assert compose(told).data.tokenizer == str(tmp_path)
    assert compose([*told, "data.tokenizer=other"]).data.tokenizer == "other"
    assert compose([*told, "data=synthetic"]).data.tokenizer is None


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("model.quantize=nf4",), "train adapters on them, model.lora="),
        (("model.quantize=int4", LORA), "must be one of nf4, fp4, int8"),
        (("model.quantize=nf4", LORA, "parallel=zero1"), "use parallel=ddp, or fsdp"),
        (("model.quantize=nf4", LORA, "model.init=random"), "leave model.init=random out"),
        (("model.quantize=nf4", LORA, "compute.compile=true"), "cannot be compiled"),
    ],
)
def test_quantised_bases_that_cannot_be(folder: Path, more: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        settings(folder, *more)


@pytest.mark.parametrize(("kind", "base"), [("nf4", 9_560), ("int8", 20_480)])
def test_a_plan_counts_a_quantised_base(folder: Path, kind: str, base: int) -> None:
    def plan(*more: str) -> MemoryNeed:
        config = settings(folder, LORA, *more)
        dataset = open_dataset(config)
        return planned_memory(config, parts.blueprint(config, dataset), dataset, ALONE).need

    whole, held = plan(), plan(f"model.quantize={kind}")
    elements = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64)
    assert whole.weights - held.weights == whole.gathered - held.gathered + 4 * 32 * 64
    assert (whole.weights - held.weights, held.base) == (4 * elements, base)
    assert "quantised base" in held.line(1 << 30)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_a_quantised_base_is_near_and_in_no_checkpoint(folder: Path, kind: str) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed ([quantised])")
    tokens = hf_folder.ids()
    whole = losses(build(folder, LORA), tokens)
    engine = build(folder, LORA, f"model.quantize={kind}")
    near = losses(engine, tokens)
    bound = 0.02 if kind == "int8" else 0.2
    assert 0 < float((near / whole - 1).abs().max()) < bound
    kept = [shard.name for shard in engine.shards() if "proj" in shard.name]
    assert kept and all(".lora_" in name for name in kept)
    made = blueprint(folder, LORA, f"model.quantize={kind}")
    held, layers = made.held(CPU), dict(quantised_layers(made.twin_network))
    for name, one in held.items():
        tensors = [one.data, *([one.state] if kind == "int8" else one.state.as_dict(True).values())]
        size = sum(t.numel() * t.itemsize for t in tensors if isinstance(t, Tensor))
        assert 0 <= size - layers[name].num_bytes < 2048
    assert made.base_digest(CPU) == blueprint(folder, LORA, f"model.quantize={kind}").base_digest(
        CPU
    )

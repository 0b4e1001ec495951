"""``python -m runner import`` of Hugging Face weights with their ``config.json``.

The reference is written from the formulas of the published models (Touvron et al. 2023, Llama;
Su et al. 2021, rotary positions in the layout of the published weights; Zhang & Sennrich 2019),
in FP64, and shares no code with the decoder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from runner.__main__ import main
from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.config.compose import compose
from runner.convert.model_config import read_model
from runner.model.decoder import Decoder
from runner.session import parts
from runner.session.corpus import open_dataset, sample_stream
from runner.system.error import ConfigError
from tests.run import ONE_LAYER, TINY, TWO_LAYERS, finish
from tests.stored import read_range

Weights = dict[str, Tensor]
Tree = dict[str, Any]

SETTINGS = tuple(word for word in TINY if word != ONE_LAYER)  # the files tell how many

# Far from the defaults of this project in everything that can be set.
LLAMA: Tree = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 96,
    "rope_theta": 500.0,
    "rms_norm_eps": 0.01,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": 8,
    "torch_dtype": "bfloat16",
    "_name_or_path": "somebody/model",
    "bos_token_id": 1,
    "rope_scaling": None,
}
VERSION_5 = {
    **{key: value for key, value in LLAMA.items() if key not in ("rope_theta", "rope_scaling")},
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"],
           "sliding_window": 64}  # fmt: skip
QWEN = {
    **LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
    "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 4,
    "layer_types": ["full_attention"] * 2,
}  # fmt: skip


def foreign_weights(tree: Tree) -> Weights:
    """Random weights under Hugging Face's names, so large that positions and epsilons matter."""
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int, std: float) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    dim, ffn = tree["hidden_size"], tree["intermediate_size"]
    width = dim // tree["num_attention_heads"]
    kv_dim = width * tree["num_key_value_heads"]
    found = {"model.embed_tokens.weight": random(tree["vocab_size"], dim, std=0.1)}
    for number in range(tree["num_hidden_layers"]):
        at = f"model.layers.{number}"
        for name, rows in (("q", dim), ("k", kv_dim), ("v", kv_dim), ("o", dim)):
            found[f"{at}.self_attn.{name}_proj.weight"] = random(rows, dim, std=0.3)
        for name, shape in (("gate", (ffn, dim)), ("up", (ffn, dim)), ("down", (dim, ffn))):
            found[f"{at}.mlp.{name}_proj.weight"] = random(*shape, std=0.1)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{name}.weight"] = 1 + random(dim, std=0.1)
        if tree["model_type"] == "qwen3":
            for name in ("q_norm", "k_norm"):
                found[f"{at}.self_attn.{name}.weight"] = 1 + random(width, std=0.1)
    found["model.norm.weight"] = 1 + random(dim, std=0.1)
    if not tree["tie_word_embeddings"]:
        found["lm_head.weight"] = random(tree["vocab_size"], dim, std=0.3)
    return found


def reference(tree: Tree, weights: Weights, tokens: Tensor) -> Tensor:
    """Logits ``[B, T, vocab]`` in FP64."""
    w = {name: value.double() for name, value in weights.items()}
    heads, kv_heads = tree["num_attention_heads"], tree["num_key_value_heads"]
    theta = tree.get("rope_theta") or tree["rope_parameters"]["rope_theta"]
    width, length = tree["hidden_size"] // heads, tokens.shape[1]
    rates = torch.tensor([theta ** (-2 * i / width) for i in range(width // 2)]).double()
    angles = torch.arange(length).double()[:, None] * torch.cat([rates, rates])[None]

    def norm(x: Tensor, name: str) -> Tensor:
        mean_square = (x * x).mean(-1, keepdim=True)
        return x / (mean_square + tree["rms_norm_eps"]).sqrt() * w[name]

    def turned(x: Tensor) -> Tensor:
        half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
        return x * angles.cos() + half * angles.sin()

    def split(x: Tensor, number: int) -> Tensor:
        return x.reshape(*x.shape[:2], number, width).transpose(1, 2)

    x = w["model.embed_tokens.weight"][tokens]
    for number in range(tree["num_hidden_layers"]):
        at = f"model.layers.{number}"
        y = norm(x, f"{at}.input_layernorm.weight")
        q = split(y @ w[f"{at}.self_attn.q_proj.weight"].T, heads)
        k = split(y @ w[f"{at}.self_attn.k_proj.weight"].T, kv_heads)
        v = split(y @ w[f"{at}.self_attn.v_proj.weight"].T, kv_heads)
        if tree["model_type"] == "qwen3":
            q, k = (
                norm(q, f"{at}.self_attn.q_norm.weight"),
                norm(k, f"{at}.self_attn.k_norm.weight"),
            )
        q, k = turned(q), turned(k)
        of = torch.arange(heads) // (heads // kv_heads)
        scores = q @ k[:, of].transpose(2, 3) / math.sqrt(width)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, of]
        x = x + mixed.transpose(1, 2).flatten(2) @ w[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm.weight")
        gate = y @ w[f"{at}.mlp.gate_proj.weight"].T
        inner = gate * torch.sigmoid(gate) * (y @ w[f"{at}.mlp.up_proj.weight"].T)
        x = x + inner @ w[f"{at}.mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight"] if tree["tie_word_embeddings"] else w["lm_head.weight"]
    return norm(x, "model.norm.weight") @ head.T


def saved(folder: Path, tree: Tree, weights: Weights | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights or foreign_weights(tree), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


Import = Callable[..., tuple[int, str]]
SEQ = "data.seq_len=32"


@pytest.fixture
def import_(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Import:
    """The command in this process, into ``tmp_path/run``; gives exit code and what it said."""

    def run(source: Path, *arguments: str) -> tuple[int, str]:
        code = main(["import", str(source), f"out={tmp_path / 'run'}", *SETTINGS, SEQ, *arguments])
        told = capsys.readouterr()
        return code, told.out + told.err

    return run


def added(text: str) -> list[str]:
    """The settings that the command says to give to the training command."""
    [line] = [line for line in text.splitlines() if "config.json sets: " in line]
    return line.partition(" sets: ")[2].split()


def decoder_of(out: Path, settings: list[str]) -> Decoder:
    """The decoder of these settings, with the weights in the run's only checkpoint."""
    config = compose([*SETTINGS, SEQ, *settings])
    model = Decoder(parts.model_shape(config, open_dataset(config)))
    (entry,), damaged = CheckpointDirectory(out / "ring").entries()
    assert not damaged
    state = {
        name: read_range(entry, f"param/{name}", 0, value.numel()).view(value.shape)
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(state)
    return model


TOKENS = torch.randint(0, 96, (3, 32), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("tree", [VERSION_5, MISTRAL], ids=["5", "mistral"])
def test_other_files_give_the_settings_of_the_formulas(tree: Tree, tmp_path: Path) -> None:
    theirs, ours = (
        read_model(saved(tmp_path / str(number), one) / "config.json", seq_len=32).settings
        for number, one in enumerate((tree, LLAMA))
    )
    assert theirs == ours


@pytest.mark.parametrize("tree", [LLAMA, QWEN], ids=["llama", "qwen"])
def test_imported_weights_give_the_logits_of_the_formulas(
    tree: Tree, import_: Import, tmp_path: Path
) -> None:
    code, text = import_(saved(tmp_path / "weights", tree))
    assert code == 0, text
    settings = added(text)
    expected = reference(tree, foreign_weights(tree), TOKENS)
    with torch.no_grad():
        logits = decoder_of(tmp_path / "run", settings)(TOKENS)
    assert torch.allclose(logits.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    # And each setting is of consequence: with its default alone the logits are others.
    for one in settings:
        if one.split("=")[0] in ("model.norm_eps", "model.rope_theta"):
            others = [text for text in settings if text != one]
            with torch.no_grad():
                wrong = decoder_of(tmp_path / "run", others)(TOKENS)
            assert (wrong.argmax(-1) != expected.argmax(-1)).float().mean() > 0.05, one


def test_a_run_trains_from_what_the_command_says(import_: Import, tmp_path: Path) -> None:
    code, text = import_(saved(tmp_path / "weights", LLAMA), "model.dim=48")
    assert code == 0, text
    assert "model.dim=48" not in added(text), "was given"
    shared = ("compute.precision=fp32", SEQ, "steps=2", "batch.global_size=4", "schedule.warmup=1")
    refused_code = main(["import", str(tmp_path / "weights"), f"out={tmp_path / 'run'}", *SETTINGS])
    assert refused_code == 2, "a run is there"
    again = tmp_path / "again"
    told = ["import", str(tmp_path / "weights"), f"out={again}", *SETTINGS, *shared]
    assert main(told) == 0
    result = finish(again, TWO_LAYERS, *shared, *added(text), "model.dim=48", ranks=0)
    config = compose([*SETTINGS, *shared, *added(text), "model.dim=48"])
    dataset = open_dataset(config)
    indices = sample_stream(config, dataset).indices(range(4))
    rows = torch.stack([torch.as_tensor(dataset[int(i)].tokens).long() for i in indices])
    logits = reference(LLAMA, foreign_weights(LLAMA), rows[:, :-1])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert result.counted()[1]["loss"] == pytest.approx(float(expected), rel=1e-4)


LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type='yarn'"),
        ({"rope_scaling": {**LLAMA_3, "factor": None}}, "rope_scaling.factor=None"),
        ({"rope_scaling": {**LLAMA_3, "beta": 1.0}}, "rope_scaling.beta=1.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type='linear'"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor=2.0"),
        (
            {"rope_parameters": LLAMA_3, "rope_scaling": {**LLAMA_3, "factor": 2.0}},
            "contradict each other",
        ),
        ({"rope_parameters": {"rope_theta": 1.0}}, "contradict each other"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"model_type": "gpt2"}, "model_type='gpt2': must be one of llama, mistral, qwen3"),
        ({"model_type": None}, "model_type=None"),
        ({"model_type": ["llama"]}, "model_type=['llama']"),
        ({"architectures": ["LlamaBidirectionalModel"]}, "architectures="),
        ({"architectures": 3}, "architectures=3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': must be 'silu'"),
        ({"attention_bias": True}, "attention_bias=True: must be False"),
        ({"attention_bias": 0}, "attention_bias=0: must be False"),
        ({"mlp_bias": True}, "mlp_bias=True: must be False"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads="),
        ({"head_dim": 16}, "head_dim=16: must be hidden_size / num_attention_heads = 8"),
        ({"sliding_window": 16}, "sliding_window=16: attention sees the whole sequence here"),
        ({"max_position_embeddings": 16}, "max_position_embeddings=16"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0: is not known"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "48"}, "hidden_size='48': must be a whole number"),
        ({"hidden_size": True}, "hidden_size=True: must be a whole number"),
        ({"hidden_size": 1 << 40}, "hidden_size=1099511627776"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small': must be a finite number above 0"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0"),
        ({"rope_theta": [1]}, "rope_theta=[1]"),
        ({"rope_scaling": "llama3"}, "rope_scaling='llama3': must be an object"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no': must be true or false"),
        ({"layer_types": ["chunked_attention"]}, "layer_types="),
        ({"\x1b[31m": 1}, r"'\x1b[31m'=1: is not known"),
        ({"num_attention_heads": 7, "head_dim": None}, "model.heads=7"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_key(
    change: Tree, words: str, import_: Import, tmp_path: Path
) -> None:
    code, text = import_(saved(tmp_path / "weights", LLAMA | change, foreign_weights(LLAMA)))
    assert (code, words in text) == (2, True), text
    assert "Traceback" not in text and not (tmp_path / "run").exists()


def test_every_problem_is_told_at_once(import_: Import, tmp_path: Path) -> None:
    tree = LLAMA | {"rope_scaling": {"type": "yarn"}, "mlp_bias": True, "hidden_act": "relu"}
    _, text = import_(saved(tmp_path / "weights", tree, foreign_weights(LLAMA)))
    assert all(f"config.json: {key}" in text for key in ("rope_scaling", "mlp_bias", "hidden_act"))
    tree = LLAMA | {f"unknown_{number}": 1 for number in range(1000)}
    _, text = import_(saved(tmp_path / "weights", tree, foreign_weights(LLAMA)))
    assert "and 980 more" in text and len(text.splitlines()) < 30


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"3", b"\xff\xfe{}", b'{"model_type": NaN}', b"[" * 100_000,
     b'{"hidden_size": ' + b"1" * 10_000 + b"}", b" " * (5 << 20)],
)  # fmt: skip
def test_a_file_that_is_no_such_json_is_refused(
    content: bytes, import_: Import, tmp_path: Path
) -> None:
    saved(tmp_path / "weights", LLAMA)
    (tmp_path / "weights" / "config.json").write_bytes(content)
    code, text = import_(tmp_path / "weights")
    assert code == 2 and "config.json" in text and "Traceback" not in text, text
    assert not (tmp_path / "run").exists()


def test_settings_that_contradict_the_file_are_refused(import_: Import, tmp_path: Path) -> None:
    place = saved(tmp_path / "weights", LLAMA)
    code, text = import_(place, "model.rope_theta=10000", "model.kv_heads=2", "model.norm_eps=1e-5")
    assert code == 2
    assert f"model.rope_theta=10000.0: {place / 'config.json'} says 500.0" in text
    assert "model.norm_eps=1e-05" in text and "kv_heads" not in text
    # What null stands for is no contradiction.
    tree = LLAMA | {"num_key_value_heads": 6}
    code, text = import_(saved(tmp_path / "even", tree), "model.kv_heads=null")
    assert code == 0 and "kv_heads" not in " ".join(added(text)), text


def test_a_key_can_be_passed_over_on_the_users_word(import_: Import, tmp_path: Path) -> None:
    tree = LLAMA | {"made_by": "somebody", "rope_scaling": {"rope_type": "yarn"}}
    place = saved(tmp_path / "weights", tree)
    code, text = import_(place, "--ignore", "made_by")
    assert code == 2 and "made_by" not in text and "rope_scaling.rope_type" in text
    code, text = import_(place, "--ignore", "made_by", "--ignore", "rope_scaling")
    assert code == 0 and "model.rope_theta=500.0" in added(text)
    code, text = import_(place, "--ignore", "typo")
    assert code == 2 and "--ignore typo: " in text and "has no such key" in text


def test_the_file_is_found_beside_above_or_where_told(import_: Import, tmp_path: Path) -> None:
    place = saved(tmp_path / "weights", LLAMA | {"mlp_bias": True})
    (place / "inner").mkdir()
    (place / "model.safetensors").rename(place / "inner" / "model.safetensors")
    for source in (place / "inner", place / "inner" / ".." / "inner"):
        assert "mlp_bias=True" in import_(source)[1]
    (place / "config.json").rename(tmp_path / "elsewhere.json")
    assert (
        "mlp_bias=True"
        in import_(place / "inner", "--model-config", str(tmp_path / "elsewhere.json"))[1]
    )
    assert import_(place / "inner", "--model-config", "nowhere.json")[0] == 2
    (tmp_path / "elsewhere.json").rename(place / "inner" / "config.json")
    file = place / "inner" / "model.safetensors"
    assert "mlp_bias=True" in import_(file)[1]
    # Left unread, the weights do not fit by their names any more: nothing is guessed.
    code, text = import_(file, "--model-config", "none")
    assert code == 2 and "missing" in text
    code, text = import_(file, "--model-config", "none", "--ignore", "mlp_bias")
    assert code == 2 and "no config.json is read" in text


def test_the_window_may_be_as_long_as_the_sequences(tmp_path: Path) -> None:
    path = saved(tmp_path, MISTRAL) / "config.json"
    assert read_model(path, seq_len=64).settings["model.qk_norm"] is False
    for change in ({"sliding_window": None}, {"layer_types": ["full_attention"] * 2}):
        path.write_text(json.dumps(MISTRAL | {"max_position_embeddings": 9999} | change))
        read_model(path, seq_len=9000)
    # Mistral's own code takes 4,096 where the key is missing.
    tree = MISTRAL | {"max_position_embeddings": 9999}
    del tree["sliding_window"]
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="sliding_window=4096"):
        read_model(path, seq_len=9000)

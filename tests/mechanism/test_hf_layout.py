"""The decoder in Llama's layout: the same logits under transformers, both ways, without a download.

Networks are built from configurations, with random weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.__main__ import main
from runner.config.compose import compose
from runner.model.decoder import Decoder, DecoderShape, RopeScaling, rotary_table
from runner.run_dir.paths import RunDir
from runner.session import parts
from runner.session.corpus import open_dataset
from runner.system.error import ConfigError
from tests.mechanism.test_import_model import LLAMA, QWEN, Import, import_, saved
from tests.mechanism.weights import set_initial_weights
from tests.rows import full

__all__ = ["import_"]
# So short that both kinds of frequency and those between them lie within a few positions.
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SCALED = {**LLAMA, "rope_scaling": LLAMA_3}
TOKENS = torch.randint(0, 96, (3, 32), generator=torch.Generator().manual_seed(4))


def decoder(folder: Path, settings: list[str]) -> Decoder:
    """The decoder of these settings, with the plain export's weights."""
    from safetensors.torch import load_file

    config = compose(settings)
    made = Decoder(parts.model_shape(config, open_dataset(config)))
    made.load_state_dict(load_file(folder / "model.safetensors"))
    return made


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param(SCALED, id="llama3"),
        full({**SCALED, "tie_word_embeddings": True}, id="tied"),
        full(LLAMA, id="plain"),
        full(QWEN, id="qwen"),
    ],
)
def test_there_and_back_again(
    tree: dict[str, Any], import_: Import, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hugging Face's folder -> a run -> Hugging Face's folder: the same logits at every place."""
    transformers = pytest.importorskip("transformers")
    place = saved(tmp_path / "theirs", tree)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        theirs = load(place, dtype=torch.float32)(TOKENS).logits
    code, text = import_(place, "data.vocab_size=96")
    assert code == 0, text
    run, out = str(tmp_path / "run"), tmp_path / "ours"
    assert main(["export", run, str(tmp_path / "plain"), "--step", "0"]) == 0
    assert main(["export", run, str(out), "--step", "0", "--format", "hf"]) == 0
    told = RunDir(tmp_path / "run").stored_settings()
    settings = [
        f"{k}={json.dumps(v)}" for k, v in told.items() if k[:6] == "model." and v is not None
    ]
    settings = [text.replace('"', "") for text in settings]
    settings = [*settings, "data=synthetic", "data.vocab_size=96", "data.seq_len=32"]
    with torch.no_grad():
        ours = decoder(tmp_path / "plain", settings)(TOKENS)
        again = load(out, dtype=torch.float32)(TOKENS).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again, ours, atol=1e-5, rtol=1e-5)
    with pytest.raises(AssertionError):  # so that a wrong rotation would be seen
        torch.testing.assert_close(ours[:, 20:], theirs[:, 19:-1], atol=1e-2, rtol=1e-2)


def test_rotations_are_stretched_as_in_llama_3() -> None:
    """By the published values at the two ends, and once between them."""
    shape = DecoderShape(
        vocab_size=8, dim=128, layers=1, heads=1, kv_heads=1, ffn_dim=8, seq_len=2,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                 original_max_position_embeddings=8192),
    )  # fmt: skip
    plain = 500_000.0 ** (-torch.arange(64).double() / 64)
    angles = torch.atan2(*(getattr(rotary_table(shape, torch.device("cpu")), n)[1].double()
                           for n in ("sin", "cos")))  # fmt: skip
    ratio = angles / plain
    assert ratio[:29] == pytest.approx(1.0, rel=1e-6)  # a turn in less than 2,048 tokens
    assert ratio[36:] == pytest.approx(1 / 8, rel=1e-5)  # and in more than 8,192
    turns = 8192 * plain[32] / (2 * torch.pi)
    share = (turns - 1) / 3
    assert ratio[32] == pytest.approx(float(share + (1 - share) / 8), rel=1e-5)


@pytest.mark.parametrize("preset", ["llama_1b", "llama_8b"])
def test_the_presets_are_what_they_are_called(preset: str) -> None:
    """Their numbers in the published config.json."""
    config = compose([f"model={preset}", "data=synthetic", "data.vocab_size=128256"])
    shape = parts.model_shape(config, open_dataset(config))
    factor, tied, dim = {"llama_1b": (32.0, True, 2048), "llama_8b": (8.0, False, 4096)}[preset]
    assert shape.rope_scaling == RopeScaling(
        factor=factor, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192
    )
    assert (shape.dim, shape.tied_head, shape.norm_eps) == (dim, tied, 1e-5)


def test_bytes_as_tokens_have_a_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from runner.command.export_hf import write_byte_tokenizer

    write_byte_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Größe, \U0001f642 and\n\ttabs \x00\x7f"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.eos_token_id, len(tokenizer)) == (256, 257)


def test_a_decoder_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    made = Decoder(
        DecoderShape(vocab_size=8, dim=8, layers=1, heads=2, kv_heads=1, ffn_dim=8, seq_len=4)
    )
    set_initial_weights(made, seed=0)
    from runner.convert.model_config import llama_config, llama_name

    with pytest.raises(ConfigError, match="is no parameter of the decoder"):
        llama_name("layers.0.weight")
    with pytest.raises(ConfigError, match="not those of the decoder"):
        llama_config({}, {"layers.0.weight": (2, 2)}, "float32")
    assert len({llama_name(name) for name, _ in made.named_parameters()}) == 11

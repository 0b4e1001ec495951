"""From a Hugging Face folder to a Hugging Face folder: fine-tuned, resumed, exported, loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runner.__main__ import main
from runner.config.compose import compose
from runner.session import parts
from runner.session.corpus import open_dataset
from tests import hf_folder
from tests.drills.compare import assert_as_if_never_there, assert_killed_is_as_not
from tests.rows import full
from tests.run import TWO_LAYERS, Result, finish, train

for package in ("transformers", "datasets", "peft"):
    pytest.importorskip(package)
pytestmark = pytest.mark.usefixtures("leaves_nothing")
EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_finetune.py"
LORA = "model.lora={r: 8, targets: all-linear, alpha: 32}"
# A hundred; the answer is the question's first letter, four times.
WORDS = [f"{letter}{number}" for letter in "abcdefghij" for number in range(10)]
SYNTHETIC = ("data=synthetic", f"data.vocab_size={len(hf_folder.LETTERS)}", "data.seq_len=32")
SHORT = ("steps=24", "schedule.total=24", "guard.min_history=8")


def chat(word: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": word}, {"role": "assistant", "content": 4 * word[0]}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with random weights in three files, and its tokenizer."""
    made = hf_folder.llama(tmp_path / "model", shard="40KB")
    return hf_folder.tokenizer(made)


def tuned(tmp_path: Path, folder: Path, *more: str) -> list[str]:
    """Fine-tuning on chats."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(json.dumps({"messages": chat(word)}) for word in WORDS))
    told = ["model=hf", f"model.path={folder}", "data=hf", f"data.path={chats}"]
    told += ["data.messages=messages", "data.pack=true", "data.seq_len=48", "optim.lr=1e-2"]
    told += [f"data.cache={tmp_path}/cache", "batch.global_size=8", "batch.micro_size=4"]
    return [*told, "steps=60", "schedule.total=60", "optim.weight_decay=0", *more]


def ours(run: Result, told: list[str], tmp_path: Path) -> Any:
    """The network as the runner has it, with the weights of the last checkpoint."""
    plain = tmp_path / "plain"
    assert main(["export", str(run.out), str(plain)]) == 0
    config = compose([f"out={run.out}", *told])
    dataset = open_dataset(config)
    blueprint = parts.blueprint(config, dataset, run.out / "pretrained")
    network = blueprint.made().eval()
    missing, unexpected = network.load_state_dict(load_file(plain / "model.safetensors"), False)
    assert not unexpected and all("lm_head" in name for name in missing)
    return network


@torch.no_grad()
def greedy(network: Any, prompt: list[int], count: int) -> list[int]:
    """Word by word, without a cache, to the end mark."""
    tokens = torch.tensor([prompt])
    for _ in range(count):
        told = network(tokens)
        best = getattr(told, "logits", told)[:, -1].argmax(dim=-1, keepdim=True)
        tokens = torch.cat([tokens, best], dim=1)
        if int(best) == 0:
            break
    return tokens[0, len(prompt) :].tolist()


@torch.no_grad()
def assert_the_same(network: Any, exported: Path) -> list[str]:
    """Logits, and what is said to some of the chats; gives the latter as text."""
    from transformers import AutoTokenizer

    theirs, tokenizer = hf_folder.loaded(exported), AutoTokenizer.from_pretrained(exported)
    ids = hf_folder.ids()
    told = network(ids)
    told = getattr(told, "logits", told)
    torch.testing.assert_close(theirs(ids).logits, told, atol=1e-5, rtol=1e-5)
    said = []
    for word in WORDS[::25]:
        prompt = tokenizer.apply_chat_template(
            chat(word)[:1], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        own = greedy(network, prompt, 8)
        given = torch.tensor([prompt])
        made = theirs.generate(given, do_sample=False, max_new_tokens=8, pad_token_id=0)
        assert made[0, len(prompt) :].tolist() == own
        said.append(tokenizer.decode(own).replace(" ", ""))
    return said


CASES = [
    pytest.param("fsdp", 0, "", id="fsdp-1"),
    *(
        full(engine, ranks, more, id=f"{engine}-{ranks}{'-lora' * bool(more)}")
        for engine in ("fsdp", "zero1")
        for ranks in (1, 2)
        for more in ("", LORA)
    ),
]


@pytest.mark.parametrize(("engine", "ranks", "more"), CASES)
def test_fine_tuned_on_chats_resumed_without_the_folder_and_loaded(
    tmp_path: Path, folder: Path, engine: str, ranks: int, more: str
) -> None:
    told = tuned(tmp_path, folder, f"parallel={engine}", *([more] if more else []))
    finish(tmp_path / "run", *told, "steps=30", ranks=ranks)
    # The ring has the weights and the run has config.json: the folder may lose them.
    for path in [*folder.glob("*.safetensors*"), folder / "config.json"]:
        path.unlink()
    run = finish(tmp_path / "run", *told, ranks=ranks)
    losses = [line["loss"] for line in run.metrics()]
    assert losses[-1] < (0.5 if more else 0.3) * losses[0], losses
    out = tmp_path / "exported"
    arguments = ["--format", "hf", *(["--merge"] if more else [])]
    assert main(["export", str(run.out), str(out), *arguments]) == 0
    said = assert_the_same(ours(run, told, tmp_path), out)
    right = sum(text == 4 * word[0] + "~" for text, word in zip(said, WORDS[::25], strict=True))
    assert right >= 3 or more, said


@pytest.mark.full
@pytest.mark.parametrize(("engine", "ranks"), [("fsdp", 2), ("zero1", 1)])
def test_the_decoder_tuned_on_chats_is_a_llama(
    tmp_path: Path, folder: Path, engine: str, ranks: int
) -> None:
    told = [text for text in tuned(tmp_path, folder) if not text.startswith("model")]
    told += [f"data.tokenizer={folder}", f"parallel={engine}", "model.kv_heads=1", TWO_LAYERS]
    scaling = "factor: 4, low_freq_factor: 1, high_freq_factor: 4"
    told += [f"model.rope_scaling={{{scaling}, original_max_position_embeddings: 16}}"]
    run = finish(tmp_path / "run", *told, ranks=ranks)
    losses = [line["loss"] for line in run.metrics()]
    assert losses[-1] < 0.5 * losses[0], losses
    out = tmp_path / "exported"
    assert main(["export", str(run.out), str(out), "--format", "hf"]) == 0
    assert_the_same(ours(run, ["model=tiny", *told], tmp_path), out)


def test_the_example_trains_adapters_that_peft_loads(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel

    monkeypatch.chdir(tmp_path)
    told = ["model=hf", f"model.path={folder}", "data=hf", f"data.cache={tmp_path}/cache"]
    told += ["optim.lr=2e-2", "steps=30", "data.vocab_size=null"]
    run = finish(tmp_path / "run", *told, ranks=0, program=EXAMPLE)
    losses = [line["loss"] for line in run.metrics()]
    assert losses[-1] < 0.9 * losses[0], losses
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    assert main(["export", str(run.out), str(adapter), "--format", "hf"]) == 0
    assert main(["export", str(run.out), str(merged), "--format", "hf", "--merge"]) == 0
    small = load_file(adapter / "adapter_model.safetensors")
    assert len(small) == 2 * 2 * 7 and not list(adapter.glob("model*"))
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(hf_folder.loaded(folder), adapter)
        theirs = loaded(hf_folder.ids()).logits
        whole = hf_folder.loaded(merged)(hf_folder.ids()).logits
        before = hf_folder.loaded(folder)(hf_folder.ids()).logits
    torch.testing.assert_close(whole, theirs, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(whole, before, atol=1e-2)


@pytest.mark.full
def test_an_export_in_bf16_and_parts(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.command import export as export_module

    told = ("model=hf", f"model.path={folder}", *SYNTHETIC, "data.vocab_size=42", *SHORT)
    run = finish(tmp_path / "run", *told, ranks=0)
    monkeypatch.setattr(export_module, "_SHARD_BYTES", 20_000)
    out = tmp_path / "exported"
    arguments = ["export", str(run.out), str(out), "--format", "hf", "--dtype", "bf16"]
    assert main(arguments) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    whole = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert {tensor.dtype for tensor in whole.values()} == {torch.bfloat16}
    total = 2 * sum(tensor.numel() for tensor in whole.values())
    assert index["metadata"]["total_size"] == total and index["weight_map"].keys() == whole.keys()
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    rounded = {name: tensor.float() for name, tensor in whole.items()}
    assert all(torch.equal(rounded[n], t) for n, t in hf_folder.loaded(out).state_dict().items())
    assert main(arguments) == 2, "a folder with weights is refused"


@pytest.mark.full
@pytest.mark.parametrize("engine", ["fsdp", "zero1", "zero3"])
@pytest.mark.parametrize("more", ["", LORA], ids=["whole", "lora"])
def test_poisoned_as_told_and_killed_as_not(
    tmp_path: Path, folder: Path, engine: str, more: str
) -> None:
    told = ["model=hf", f"model.path={folder}", *SYNTHETIC, f"parallel={engine}", *SHORT]
    told += [more] if more else []
    assert_as_if_never_there(tmp_path, told, "faults=[poison@samples=420-520]")
    assert_killed_is_as_not(tmp_path, told, at=14, gone=folder)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["fsdp", "zero1", "zero3"])
def test_a_mixture_of_experts_is_a_guest_like_others(tmp_path: Path, engine: str) -> None:
    """From a config alone: which experts a token takes is part of the step, and repeats."""
    folder = hf_folder.experts(tmp_path / "model")
    settings = ["model=hf", f"model.path={folder}", "model.init=random", *SYNTHETIC]
    settings += [f"parallel={engine}", *SHORT]
    assert_as_if_never_there(tmp_path, settings, "faults=[poison@samples=420-520]")
    whole = assert_killed_is_as_not(tmp_path, settings, at=14)
    losses = [line["loss"] for line in whole.metrics()]
    assert losses[-1] < losses[0] - 0.1, losses
    assert main(["export", str(whole.out), str(tmp_path / "weights")]) == 0
    from transformers import AutoConfig, AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    assert not theirs.load_state_dict(weights, strict=False).unexpected_keys
    assert main(["export", str(whole.out), str(tmp_path / "hf"), "--format", "hf"]) == 0
    again = hf_folder.loaded(tmp_path / "hf").state_dict()
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    assert any(
        ".experts.3.w1.weight" in name for name in load_file(tmp_path / "hf/model.safetensors")
    )


@pytest.mark.full
def test_a_decoder_on_text_has_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a small text, again and again. " * 400)
    told = ("data=text", f"data.path={tmp_path}/text", f"data.cache={tmp_path}/cache")
    run = finish(tmp_path / "run", *told, "data.seq_len=32", *SHORT, ranks=0)
    out = tmp_path / "exported"
    assert main(["export", str(run.out), str(out), "--format", "hf"]) == 0
    from transformers import AutoTokenizer

    tokenizer, theirs = AutoTokenizer.from_pretrained(out), hf_folder.loaded(out)
    ids = tokenizer("a small text", return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == list(b"a small text")
    with torch.no_grad():
        loss = float(theirs(ids, labels=ids).loss)
    assert loss < 5 and theirs.config.eos_token_id == 256


@pytest.mark.full
@pytest.mark.parametrize("engine", ["fsdp", "zero1"])
def test_weights_that_one_rank_cannot_take_end_all_ranks_in_words(
    tmp_path: Path, folder: Path, engine: str
) -> None:
    name = "lm_head.weight"
    [path] = [path for path in folder.glob("*.safetensors") if name in load_file(path)]
    weights = load_file(path)
    weights[name][-1] = float("nan")  # of the last rank alone
    save_file(weights, path, metadata={"format": "pt"})
    told = ("model=hf", f"model.path={folder}", *SYNTHETIC, *SHORT, f"parallel={engine}")
    run = train(tmp_path / "run", *told, ranks=2)
    assert f"{name!r} holds NaN or Inf" in run.text, run.tail
    assert run.text.count("exitcode  : 2 (pid") == 2, run.tail

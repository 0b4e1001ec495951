"""``export --format hf``: a folder that Hugging Face transformers loads.

The decoder goes out in Llama's layout; a Hugging Face model under its own names, its adapters
(``model.lora``) by themselves or merged.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from runner.checkpoint.disk.directory import Entry
from runner.command.export import Layout, Output, Read, buffers_in, shapes_in
from runner.config.mappings import LoraSettings, lora_of
from runner.convert.model_config import llama_config, llama_name
from runner.convert.weights import CONFIG, FAST_CLASS, TOKENIZER, copy_tokenizer, open_pretrained
from runner.data.tokenizer import BYTE_END, BYTE_VOCAB_SIZE, open_codec
from runner.model import pretrained
from runner.model.recompute import NONE
from runner.model.recorded import record
from runner.run_dir.paths import RunDir
from runner.system.error import ConfigError, DataError
from runner.system.files import write_json

_CONFIG: Final = "config.json"
_BYTE_END_NAME: Final = "<|end|>"
_GENERATION: Final = "generation_config.json"
_ADAPTER: Final = "default"  # PEFT's name of it
_ADAPTED: Final = ".base_layer.weight"
_DTYPES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class HfExport:
    """Makes the layout of a checkpoint of this run.

    Args:
        dtype: of the weights to be written.
        merge: whether adapters are merged into the weights.
    """

    run: RunDir
    dtype: torch.dtype
    merge: bool

    def __call__(self, entry: Entry) -> Layout:
        """
        Raises:
            ConfigError: the run's settings are missing, or name a model without such a layout.
        """
        settings = _settings(self.run)
        if settings.get("model._target_") is not None:
            raise ConfigError(
                f"--format hf: the run trains model._target_={settings['model._target_']}, and "
                "only its own code knows its config.json; export without --format, or train a "
                "Hugging Face model as model=hf"
            )
        is_hf = settings["model.kind"] == "hf"
        lora = _lora(settings) if is_hf else None
        if self.merge and lora is None:
            raise ConfigError("--merge: the run trains no adapters (model.lora); leave it out")
        if self.merge and settings.get("model.quantize") is not None:
            path = settings["model.path"]
            raise ConfigError(
                f"--merge: the run holds its base quantised (model.quantize="
                f"{settings['model.quantize']}), and no checkpoint has it; leave --merge out, and "
                f"merge by PEFT: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("
                f"{path!r}), DIR).merge_and_unload()"
            )
        if not is_hf:
            return self._decoder(entry, settings)
        model = _Model(self.run, str(settings["model.path"]), lora)
        if lora is not None and not self.merge:
            return self._adapters(entry, model)
        return self._whole(entry, model)

    def _adapters(self, entry: Entry, model: _Model) -> Layout:
        own = {
            name: shape for name, shape in shapes_in(entry).items() if pretrained.is_adapter(name)
        }
        return Layout(
            stem="adapter_model",
            tensors={
                name.replace(f".{_ADAPTER}.", "."): Output(shape, name)
                for name, shape in own.items()
            },
            dtype=self.dtype,
            finish=model.write_adapter,
        )

    def _whole(self, entry: Entry, model: _Model) -> Layout:
        """All weights, with their adapters merged."""
        shapes = shapes_in(entry)
        own = {pretrained.base_name(name): output for name, output in buffers_in(entry).items()}
        tensors: dict[str, Output] = {}
        for name, shape in shapes.items():
            layer = name.removesuffix(_ADAPTED)
            if pretrained.is_adapter(name):
                continue
            if experts := model.experts(name, shape):
                tensors |= experts
                continue
            output = Output(shape, name)
            if name.endswith(_ADAPTED) and f"{layer}.lora_A.{_ADAPTER}.weight" in shapes:
                output = Output(shape, layer, model.merged)
            tensors[model.stored_name(pretrained.base_name(name))] = output
        return Layout(
            stem="model",
            tensors={**tensors, **model.buffers(), **own},
            dtype=self.dtype,
            finish=partial(model.write_files, dtype=_DTYPES[self.dtype]),
        )

    def _decoder(self, entry: Entry, settings: Mapping[str, Any]) -> Layout:
        shapes = shapes_in(entry)
        config = llama_config(settings, shapes, _DTYPES[self.dtype])
        return Layout(
            stem="model",
            tensors={llama_name(name): Output(shape, name) for name, shape in shapes.items()},
            dtype=self.dtype,
            finish=partial(_write_decoder, config=config, settings=settings),
        )


def _lora(settings: Mapping[str, Any]) -> LoraSettings | None:
    prefix = "model.lora."
    options = {
        name.removeprefix(prefix): value
        for name, value in settings.items()
        if name.startswith(prefix)
    }
    return lora_of(options) if options else None


class _Model:
    """The Hugging Face model of a run on the meta device, and its small files.

    Args:
        path: the folder from which the run began.
    """

    def __init__(self, run: RunDir, path: str, lora: LoraSettings | None) -> None:
        self._path = Path(path).expanduser()
        stored = run.pretrained
        self._files = stored if (stored / _CONFIG).is_file() else self._path
        self._lora = lora
        config = pretrained.read_config(self._files)
        self._network = record(lambda: pretrained.build(config, lora, recompute=NONE)).network
        # Raises for one that is not written.
        self._layout = pretrained.layout_on_disk(self._network)

    def stored_name(self, name: str) -> str:
        """The name of a tensor on disk: other programs know models with experts by these."""
        return self._layout.stored(name) if self._layout.fusions else name

    def experts(self, name: str, shape: tuple[int, ...]) -> dict[str, Output]:
        """The tensors that a parameter with several experts is stored as; empty if it has none."""
        own = pretrained.base_name(name)
        fusion = self._layout.fusion_of(own)
        if fusion is None or not shape:
            return {}
        names = [self.stored_name(one) for one in fusion.names(own, shape[0])]
        cut = _Cut(pretrained.part_shape(shape, len(names)))
        return {
            stored: Output(cut.shape, name, partial(cut, number))
            for number, stored in enumerate(names)
        }

    def merged(self, read: Read, layer: str) -> torch.Tensor:
        """The weight of an adapted layer with its adapter added, FP32, as PEFT adds it."""
        module: Any = self._network.get_submodule(layer)
        for part in ("lora_A", "lora_B"):
            values = read(f"{layer}.{part}.{_ADAPTER}.weight")
            getattr(module, part)[_ADAPTER].weight = torch.nn.Parameter(values, False)
        delta: torch.Tensor = module.get_delta_weight(_ADAPTER)
        return read(f"{layer}{_ADAPTED}") + delta

    def buffers(self) -> dict[str, Output]:
        """Untrained tensors that belong to the weights, as the folder had them."""
        outputs: dict[str, Output] = {}
        for name, buffer in pretrained.kept_buffers(self._network).items():
            weights, own = open_pretrained(self._path), pretrained.base_name(name)
            if own in weights.shapes:
                values = weights.read(own, 0, buffer.numel()).view(buffer.shape)
                outputs[own] = Output(tuple(buffer.shape), own, partial(_constant, values))
        return outputs

    def write_files(self, folder: Path, *, dtype: str) -> Sequence[str]:
        """``config.json``, the generation's and the tokenizer's files."""
        tree = pretrained.read_tree(self._files / _CONFIG)
        # Newer releases write dtype, and read both.
        tree = {name: value for name, value in tree.items() if name not in ("dtype", "auto_map")}
        classes = [type(pretrained.base_network(self._network)).__name__]
        write_json(folder / _CONFIG, {**tree, "architectures": classes, "torch_dtype": dtype})
        if (self._files / _GENERATION).is_file():
            shutil.copyfile(self._files / _GENERATION, folder / _GENERATION)
        return self._write_tokenizer(folder)

    def write_adapter(self, folder: Path) -> Sequence[str]:
        """``adapter_config.json``, which names the folder of the base model, and the tokenizer."""
        network: Any = self._network
        settings = network.peft_config[_ADAPTER]
        settings.base_model_name_or_path = str(self._path.absolute())
        settings.inference_mode = True
        settings.save_pretrained(folder)
        return [f"adapters alone, for {self._path}", *self._write_tokenizer(folder)]

    def _write_tokenizer(self, folder: Path) -> list[str]:
        if copy_tokenizer(self._files, folder):
            return []
        return [f"no tokenizer: {self._path} had none"]


class _Cut:
    """Cuts a parameter into equal parts; keeps it between two of them."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._whole: torch.Tensor | None = None

    def __call__(self, number: int, read: Read, name: str) -> torch.Tensor:
        if self._whole is None:
            self._whole = read(name).view(-1, *self.shape)
        part = self._whole[number].clone()
        if number == len(self._whole) - 1:
            self._whole = None
        return part


def _constant(values: torch.Tensor, read: Read, name: str) -> torch.Tensor:
    return values


def _settings(run: RunDir) -> dict[str, Any]:
    """The run's settings by dotted key, with defaults for keys that are newer than the run.

    Raises:
        ConfigError: they are not there.
    """
    stored = run.stored_settings()
    if not stored:
        raise ConfigError(
            f"--format hf: {run.config} is missing, and the weights alone do not identify their "
            "model; name the run's directory"
        )
    return stored


def _write_decoder(
    folder: Path, *, config: Mapping[str, Any], settings: Mapping[str, Any]
) -> Sequence[str]:
    notes, end = _write_tokenizer(folder, settings, config["vocab_size"])
    write_json(folder / _CONFIG, {**config, "eos_token_id": end})
    write_json(folder / _GENERATION, {"eos_token_id": end})
    return notes


def _write_tokenizer(
    folder: Path, settings: Mapping[str, Any], vocab_size: int
) -> tuple[list[str], int | None]:
    """Copy the tokenizer; returns notes about it, and the token that ends a document."""
    kind, named = settings.get("data.kind"), settings.get("data.tokenizer")
    if settings.get("data._target_") is not None or kind not in ("text", "hf"):
        return [f"no tokenizer: the data (data={kind}) had none"], None
    if named is None:
        if kind != "text" or vocab_size < BYTE_VOCAB_SIZE:
            return ["no tokenizer: data.tokenizer was not set"], None
        write_byte_tokenizer(folder)
        return [], BYTE_END
    source = Path(str(named)).expanduser()
    end = _end_token(source, settings)
    if not copy_tokenizer(source, folder, end=end):
        return [f"no tokenizer: data.tokenizer={named} no longer exists"], None
    return [], end


def _end_token(source: Path, settings: Mapping[str, Any]) -> int | None:
    try:
        codec = open_codec(str(source), begin_token="", end_token=settings.get("data.end_token"))
    except DataError:  # a chat-only tokenizer may have none
        return None
    return codec.end_token


def write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are the 256 bytes and an end mark, id 256."""
    vocab: dict[str, int] = {letter: byte for byte, letter in enumerate(_letters())}
    end: dict[str, Any] = {"id": len(vocab), "content": _BYTE_END_NAME, "special": True}
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    write_json(
        folder / TOKENIZER,
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [end | usual],
            "normalizer": None,
            "pre_tokenizer": level | {"use_regex": False},
            "post_processor": None,
            "decoder": level | {"use_regex": False},
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        },
    )
    write_json(folder / CONFIG, {"tokenizer_class": FAST_CLASS, "eos_token": _BYTE_END_NAME})


def _letters() -> list[str]:
    """The letter that byte-level tokenizers show each byte as (Radford et al. 2019, GPT-2).

    A printable byte is shown as itself, any other as the next unused character from 256 on.
    """
    printed = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]

"""``export --format hf``: a folder that Hugging Face transformers loads.

The decoder goes out in Llama's layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from runner.checkpoint.disk.directory import Entry
from runner.command.export_layout import Layout, as_it_is, shapes_in
from runner.config.schema import ModelConfig
from runner.convert.model_layout import llama_config, llama_name
from runner.convert.tokenizer_files import copy_tokenizer, write_byte_tokenizer
from runner.data.tokenizer import BYTE_END, BYTE_VOCAB_SIZE, open_codec
from runner.run_dir.paths import RunDir
from runner.system.error import ConfigError, DataError
from runner.system.files import write_json

_CONFIG: Final = "config.json"
_GENERATION: Final = "generation_config.json"
_DTYPES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class HfExport:
    """Makes the layout of a checkpoint of this run.

    Args:
        dtype: of the weights to be written.
        merge: adapters go into the weights, not beside them.
    """

    run: RunDir
    dtype: torch.dtype
    merge: bool

    def __call__(self, entry: Entry) -> Layout:
        """
        Raises:
            ConfigError: the run's settings are not there, or name a model that has no such layout.
        """
        settings = _settings(self.run)
        if settings.get("model._target_") is not None:
            raise ConfigError(
                f"--format hf: the run trains model._target_={settings['model._target_']}, and "
                "only its own code knows its config.json; export without --format, or train a "
                "Hugging Face model as model=hf"
            )
        if self.merge:
            raise ConfigError("--merge: the run trains no adapters (model.lora); leave it out")
        return self._decoder(entry, settings)

    def _decoder(self, entry: Entry, settings: Mapping[str, Any]) -> Layout:
        shapes = shapes_in(entry)
        config = llama_config(settings, shapes, _DTYPES[self.dtype])
        return Layout(
            stem="model",
            tensors={llama_name(name): as_it_is(name, shape) for name, shape in shapes.items()},
            dtype=self.dtype,
            finish=partial(_write_decoder, config=config, settings=settings),
        )


def _settings(run: RunDir) -> dict[str, Any]:
    """Of the run, by dotted key, with the defaults of what its time had no key for.

    Raises:
        ConfigError: they are not there.
    """
    stored = run.stored_settings()
    if not stored:
        raise ConfigError(
            f"--format hf: {run.config} is not there, and the weights alone do not tell their "
            "model; name the run's directory"
        )
    # Not rope_scaling, of which a run from before the key had none.
    usual = {f"model.{spec.name}": spec.default for spec in dataclasses.fields(ModelConfig)}
    return {**usual, "data.seq_len": None, **stored}


def _write_decoder(
    folder: Path, *, config: Mapping[str, Any], settings: Mapping[str, Any]
) -> Sequence[str]:
    said, end = _write_tokenizer(folder, settings, config["vocab_size"])
    write_json(folder / _CONFIG, {**config, "eos_token_id": end})
    write_json(folder / _GENERATION, {"eos_token_id": end})
    return said


def _write_tokenizer(
    folder: Path, settings: Mapping[str, Any], vocab_size: int
) -> tuple[list[str], int | None]:
    """What is said of it, and the token that ends a document."""
    kind, told = settings.get("data.kind"), settings.get("data.tokenizer")
    if settings.get("data._target_") is not None or kind not in ("text", "hf"):
        return [f"no tokenizer: the data (data={kind}) had none"], None
    if told is None:
        if kind != "text" or vocab_size < BYTE_VOCAB_SIZE:
            return ["no tokenizer: data.tokenizer was not set"], None
        write_byte_tokenizer(folder)
        return [], BYTE_END
    source = Path(str(told)).expanduser()
    if not copy_tokenizer(source, folder):
        return [f"no tokenizer: data.tokenizer={told} is not there any more"], None
    return [], _end_token(source, settings)


def _end_token(source: Path, settings: Mapping[str, Any]) -> int | None:
    try:
        codec = open_codec(str(source), begin_token="", end_token=settings.get("data.end_token"))
    except DataError:  # it does not say, as a tokenizer of chats alone may
        return None
    return codec.end_token

"""``model=hf``: makes a network from settings and a folder, and copies the folder's small files.

With the copies, a resume or an export does not depend on later changes of the folder. The folder's
weights are read only once.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

from runner.config.network import is_hf, lora_of
from runner.config.schema import RunConfig
from runner.convert.pretrained import PretrainedWeights
from runner.convert.tokenizer_files import FILES, copy_tokenizer
from runner.data.dataset import Dataset, RecordDataset
from runner.model.loss import HeadLosses
from runner.model.pretrained import (
    CONFIG,
    Lora,
    PretrainedBlueprint,
    build,
    read_config,
)
from runner.run_dir.paths import RunDir
from runner.system.error import ConfigError

GENERATION: Final = "generation_config.json"


def pretrained_blueprint(
    config: RunConfig, dataset: Dataset, files: Path | None
) -> PretrainedBlueprint:
    """The network of ``model.path``.

    Args:
        files: the run's copy of the small files; None before the run has begun.

    Raises:
        ConfigError: the network cannot be built, or is too small for the data.
    """
    model, path = config.model, Path(config.model.path).expanduser()
    settings = lora_of(model.lora)
    lora = None if settings is None else Lora(**asdict(settings))
    model_config = read_config(files or path)
    if isinstance(dataset, RecordDataset):
        raise ConfigError(
            f"data._target_={config.data._target_}: returns samples without token ids, and "
            f"model.path={path} needs input_ids"
        )
    inner = model_config.get_text_config()
    if dataset.vocab_size > inner.vocab_size:
        raise ConfigError(
            f"model.path={path}: its embedding has {inner.vocab_size} rows, and the data "
            f"{dataset.vocab_size} token ids; use the model's own tokenizer (data.tokenizer)"
        )
    most = getattr(inner, "max_position_embeddings", None)
    if isinstance(most, int) and config.data.seq_len > most:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len}: the model of model.path={path} has {most} "
            f"positions (max_position_embeddings); use at most that"
        )
    has_weights = model.init == "weights"
    return PretrainedBlueprint(
        name=f"hf:{model_config.model_type}",
        path=str(path),
        make=partial(build, model_config, lora, recompute=config.compute.recompute.value),
        open_weights=partial(PretrainedWeights, path) if has_weights else None,
        seed=config.seed,
        seq_len=config.data.seq_len,
        vocab_size=inner.vocab_size,
        frozen=config.compute.frozen,
        head_losses=head_losses(config, z_loss=0.0),
    )


def head_losses(config: RunConfig, *, z_loss: float) -> HeadLosses:
    """How the loss of large logits is computed."""
    most_bytes = round(config.model.loss_chunk_mib * (1 << 20))
    return HeadLosses(fp32=config.compute.loss_fp32, z_loss=z_loss, most_bytes=most_bytes)


def keep_small_files(config: RunConfig, run_dir: RunDir) -> None:
    """Copy the folder's ``config.json`` and tokenizer into the run directory.

    Raises:
        ConfigError: they cannot be copied.
    """
    if not is_hf(config.model):
        return
    source, folder = Path(config.model.path).expanduser(), run_dir.pretrained
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (*FILES, GENERATION, CONFIG):
            (folder / name).unlink(missing_ok=True)  # from an earlier start that saved nothing
        if config.data.tokenizer is not None:
            copy_tokenizer(Path(config.data.tokenizer).expanduser(), folder)
        else:
            copy_tokenizer(source, folder)
        # Copied last: it marks the copy as complete.
        for name in (GENERATION, CONFIG):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / f".{name}")
                (folder / f".{name}").rename(folder / name)
    except OSError as error:
        raise ConfigError(f"out={run_dir.out}: cannot be written ({error})") from None


def kept_files(run_dir: RunDir) -> str:
    """The folder of the copies; empty if no checkpoint belongs to them."""
    is_begun = run_dir.ring.is_dir() and any(
        not path.name.startswith("writing-") for path in run_dir.ring.iterdir()
    )
    has_files = (run_dir.pretrained / CONFIG).is_file()
    return str(run_dir.pretrained) if is_begun and has_files else ""

"""The typed schema of a run: every key, its type, unit, default and bounds stand here only.

YAML under ``configs/`` selects and overrides these fields; :mod:`runner.config.compose` turns the
command line into one :class:`RunConfig`. This module knows nothing of torch, Hydra or files.

Each field carries metadata: ``help`` (one line for ``--help`` and docs/configuration.md), bounds
(``ge``, ``gt``, ``le``, ``lt``), and ``trajectory``: whether changing it changes what the
run computes, so that resuming with another value must be refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


def key(
    default: Any,
    help: str,
    *,
    trajectory: bool = False,
    choices: tuple[str, ...] = (),
    shown: str = "",
    **bounds: float,
) -> Any:
    """A config field: its default, its one-line help, its bounds, the words that it allows.

    ``shown``: its type for a reader, where the annotation does not tell it.
    """
    metadata = {
        "help": help,
        "trajectory": trajectory,
        "choices": choices,
        "shown": shown,
        **bounds,
    }
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


SYNTHETIC_VOCABULARY = 64  # of kind: synthetic, where vocab_size is not given


class DataKind(Enum):
    text = "text"
    tokens = "tokens"
    synthetic = "synthetic"
    hf = "hf"


class TokenDtype(Enum):
    auto = "auto"
    uint8 = "uint8"
    uint16 = "uint16"
    uint32 = "uint32"
    int32 = "int32"
    uint64 = "uint64"


class ParallelKind(Enum):
    single = "single"
    ddp = "ddp"
    fsdp = "fsdp"
    hsdp = "hsdp"
    zero1 = "zero1"
    zero2 = "zero2"
    zero3 = "zero3"


class OptimKind(Enum):
    adamw = "adamw"
    sgd = "sgd"
    lion = "lion"
    muon = "muon"


class ScheduleKind(Enum):
    cosine = "cosine"
    wsd = "wsd"
    linear = "linear"
    constant = "constant"


class Precision(Enum):
    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


class Recompute(Enum):
    none = "none"
    blocks = "blocks"
    selective = "selective"


class DocumentAttention(Enum):
    auto = "auto"
    mask = "mask"
    flex = "flex"


class Offload(Enum):
    none = "none"
    cpu = "cpu"


class LogKind(Enum):
    text = "text"
    json = "json"


class RemedyKind(Enum):
    verdict = "verdict"
    discard = "discard"


class ExplainKind(Enum):
    off = "off"
    quick = "quick"
    full = "full"


class DebugKind(Enum):
    off = "off"
    nccl = "nccl"
    collectives = "collectives"


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder: RMSNorm, RoPE, SwiGLU; a Hugging Face model; or one of your own.

    With ``_target_`` every other key of this group is an argument of that code, and
    ``compute`` says how it is computed.
    """

    _target_: str | None = key(
        None,
        "a model of your own, such as pkg.Net: called with the other keys of this group, returns a "
        "torch module (see docs/models.md); null: the decoder",
        trajectory=True,
    )
    arguments: Any = key(
        None, "_target_: further arguments; each may also be a key of this group", trajectory=True
    )
    # Any type: beside _target_ they are arguments, of whatever type that code wants.
    kind: Any = key(
        "decoder",
        "decoder: this package's own; hf: the Hugging Face model in the folder path",
        trajectory=True,
        shown="decoder | hf",
    )
    path: Any = key(
        None,
        "hf: a local folder with config.json, *.safetensors and the tokenizer's files",
        trajectory=True,
        shown="str | null",
    )
    init: Any = key(
        "weights",
        "hf: weights: those of the folder; random: fresh ones, from its config.json alone",
        trajectory=True,
        shown="weights | random",
    )
    lora: Any = key(
        None,
        "hf: train low-rank adapters only, by PEFT: {r: 8, targets: [q_proj, v_proj], alpha: 16, "
        "dropout: 0.0, rslora: false}; null: train all weights",
        trajectory=True,
        shown="mapping | null",
    )
    dim: int = key(128, "width of the residual stream", trajectory=True, ge=2)
    layers: int = key(4, "number of blocks", trajectory=True, ge=1)
    heads: int = key(4, "attention heads; must divide dim", trajectory=True, ge=1)
    kv_heads: int | None = key(
        None,
        "key/value heads (grouped-query attention); null: as many as heads",
        trajectory=True,
        ge=1,
    )
    ffn_dim: int | None = key(
        None, "hidden width of SwiGLU; null: 8/3 dim rounded up to 64", trajectory=True, ge=1
    )
    vocab_size: int | None = key(
        None, "rows of the embedding; null: what the data needs", trajectory=True, ge=2
    )
    tied_head: bool = key(True, "the output head reuses the embedding", trajectory=True)
    qk_norm: bool = key(False, "RMSNorm on queries and keys", trajectory=True)
    norm_eps: float = key(1e-5, "epsilon of RMSNorm", trajectory=True, gt=0)
    rope_theta: float = key(10000.0, "base of the rotary frequencies", trajectory=True, gt=0)
    rope_scaling: Any = key(
        None,
        "Llama 3's scaling of the rotary frequencies: {factor: 8, low_freq_factor: 1, "
        "high_freq_factor: 4, original_max_position_embeddings: 8192}; null: none",
        trajectory=True,
        shown="mapping | null",
    )
    dropout: float = key(
        0.0, "dropout after attention and feed-forward", trajectory=True, ge=0, lt=1
    )
    z_loss: float = key(
        0.0, "weight of logsumexp(logits)^2 in the training loss", trajectory=True, ge=0
    )
    init_std: float = key(0.02, "standard deviation of the initial weights", trajectory=True, gt=0)
    loss_chunk_mib: float = key(
        512.0,
        "logits of a micro-batch that take more than this in FP32 are computed in such parts, "
        "and again in backward: less memory, the same losses; 0: never in parts",
        ge=0,
    )


# Of the decoder and of ``kind: hf``: beside ``_target_`` they are arguments like any other.
DECODER_KEYS = frozenset(
    ["dim", "layers", "heads", "kv_heads", "ffn_dim", "vocab_size", "tied_head", "qk_norm"]
) | {
    *("norm_eps", "rope_theta", "rope_scaling", "dropout", "z_loss", "init_std"),
    *("kind", "path", "init", "lora"),
}


@dataclass(slots=True, kw_only=True)
class ComputeConfig:
    """How a model is computed, the decoder or one of your own."""

    precision: Precision = key(
        Precision.auto,
        "compute type of forward and backward: bf16, fp32, or auto: as the run began; at its "
        "beginning bf16 where all ranks have it in hardware, else fp32",
        trajectory=True,
    )
    compile: bool = key(False, "torch.compile each block")
    recompute: Recompute = key(
        Recompute.none,
        "blocks: recompute the activations of blocks in backward and keep none; selective: "
        "keep only the results of products and attention; none: keep all",
    )
    frozen: list[str] = key(
        [], "regular expressions found in the names of parameters not to train", trajectory=True
    )
    loss_fp32: bool = key(True, "compute the cross-entropy in FP32", trajectory=True)
    deterministic: bool = key(
        False,
        "make a GPU repeat bits (settings of torch, cuBLAS, Inductor and NCCL), which can be "
        "slower; the start line says whether this machine repeats bits",
        trajectory=True,
    )
    document_attention: DocumentAttention = key(
        DocumentAttention.auto,
        "decoder, if data keeps documents apart: mask (of all pairs of tokens), flex "
        "(torch's flex attention, without one), or auto: flex on CUDA, else mask",
        trajectory=True,
    )


@dataclass(slots=True, kw_only=True)
class DataConfig:
    """Where samples come from: windows of ``seq_len + 1`` tokens, or what code of your own gives.

    With ``_target_`` every key of this group that is not in the table is an argument of that code.
    """

    _target_: str | None = key(
        None,
        "code of your own, such as pkg.open_data: called with the other keys, returns a data set "
        "(see docs/data.md); null: as kind says",
        trajectory=True,
    )
    arguments: Any = key(
        None, "_target_: further arguments; each may also be a key of this group", trajectory=True
    )
    kind: DataKind = key(DataKind.text, "text, tokens, synthetic or hf", trajectory=True)
    path: Any = key(
        [],
        "a file or directory, or a list of them; python:library (data=python): the source of "
        "Python's standard library",
        trajectory=True,
    )
    val_path: Any = key(
        None,
        "files for the held-out loss, read as path is, or several sets by name "
        "({wiki: A, code: B}), each with a loss; nothing of path is held out then; null: a part of "
        "path (held_out)",
        trajectory=True,
    )
    sources: Any = key(
        None,
        "a mixture: [{path: A, weight: 2, name: a}, ...]; the other keys of the group apply to all "
        "sources, and an entry may set kind, field, suffixes, token_dtype and the like for itself",
        trajectory=True,
    )
    suffixes: list[str] = key(
        [".py", ".txt", ".md", ".jsonl", ".rst", ".c", ".h"],
        "text: file name endings read from directories; .jsonl also for its compressed forms",
        trajectory=True,
    )
    # Not part of the trajectory: its effect is in the corpus' fingerprint, and runs begun without
    # the key, on files that have no such lines, go on.
    field: str | None = key(
        "text",
        "text: field of a .jsonl line, or column of a .parquet file, that holds the document; "
        "null: .jsonl files are plain text. "
        "hf: column of a row's text, if there is no input_ids",
    )
    messages: str | None = key(
        None,
        "hf: column of a row's chat, a list of {role, content}; the tokenizer's chat template "
        "makes tokens of it, and the loss counts only what the assistant says",
        trajectory=True,
    )
    pack: bool | None = key(
        None,
        "true: pack short samples into full windows, without attention between them; "
        "for hf and _target_",
        trajectory=True,
    )
    tokenizer: str | None = key(
        None,
        "text: a Hugging Face tokenizer.json or its folder; null: bytes (256 and an end mark)",
        trajectory=True,
    )
    token_dtype: TokenDtype = key(
        TokenDtype.auto,
        "tokens: type of a raw file; .npy and .idx files name theirs",
        trajectory=True,
    )
    vocab_size: int | None = key(
        None, "tokens, synthetic: number of token ids; required for tokens", trajectory=True, ge=2
    )
    seq_len: int = key(256, "tokens the model sees per sequence", trajectory=True, ge=1)
    end_token: int | str | None = key(
        None,
        "the token that ends a document. text: its id or text; null: as the tokenizer's files say. "
        "tokens: its id, for isolate_documents",
        trajectory=True,
    )
    begin_token: int | str | None = key(
        None,
        "text: id or text of the token put before each document; null: as the tokenizer's files "
        "say; empty: none",
        trajectory=True,
    )
    isolate_documents: bool = key(
        False, "attention does not cross document boundaries", trajectory=True
    )
    held_out: float = key(
        0.01, "share of samples kept out of training, by hash", trajectory=True, ge=0, lt=1
    )
    samples: int = key(100_000, "synthetic: number of samples", trajectory=True, ge=1)
    skip: list[Any] = key(
        [], "sample positions never read: [[a,b],...], half open", trajectory=True
    )
    cache: str | None = key(
        None, "directory of the token cache; null: under the user's cache directory"
    )
    max_unreadable: int = key(
        100,
        "number of different unreadable samples that may be skipped; one more ends the run",
        ge=0,
    )
    retry_seconds: float = key(
        5.0, "seconds for which reading a sample is retried after an error of the system", ge=0
    )
    workers: int = key(1, "loader processes per rank; 0: load in the training process", ge=0)
    prefetch: int = key(2, "micro-batches each worker keeps ready", ge=1)
    pin_memory: bool = key(True, "page-locked batches on CUDA")


@dataclass(slots=True, kw_only=True)
class BatchConfig:
    """Sizes in sequences. The global batch does not depend on the world size."""

    global_size: int = key(32, "sequences per step over all ranks", trajectory=True, ge=1)
    micro_size: int = key(16, "sequences per forward/backward on one rank", ge=1)


@dataclass(slots=True, kw_only=True)
class ParallelConfig:
    """How parameters are laid out over ranks."""

    kind: ParallelKind = key(ParallelKind.fsdp, "single, ddp, fsdp, hsdp, zero1, zero2 or zero3")
    shard_size: int | None = key(
        None, "hsdp: ranks that share one copy; null: the ranks of one node", ge=1
    )
    reduce_each_micro_batch: bool = key(
        True,
        "reduce gradients after every micro-batch; false: once a step, which keeps whole gradients "
        "(4 bytes a parameter); hsdp: between copies once a step, within a copy every time",
    )
    reshard_after_forward: bool = key(True, "free gathered parameters between uses (ZeRO-3)")
    offload: Offload = key(
        Offload.none,
        "cpu: FP32 weights, gradients and moments are in host memory and are updated there "
        "(single, ddp, fsdp, hsdp); none: on the device",
    )
    deepspeed: Any = key(None, "zero1-3: a mapping of further DeepSpeed settings, or null")
    device: str = key("auto", "auto, cpu or cuda")
    timeout_seconds: float = key(600.0, "a collective waits no longer than this", gt=0)
    start_seconds: float = key(
        120.0, "how long ranks wait for each other at the start before naming the absent", gt=0
    )
    max_ranks: int = key(
        16384, "more ranks are refused, because no more were ever tried: see docs/scale.md", ge=1
    )


@dataclass(slots=True, kw_only=True)
class OptimConfig:
    """Fused AdamW, or another; decay only on matrices.

    With ``_target_`` every key of this group that is not in the table is an argument of that code.
    """

    _target_: str | None = key(
        None,
        "an optimizer of your own, such as torch.optim.NAdam: called with params, lr and the other "
        "keys (see docs/optimizers.md); null: as kind says",
        trajectory=True,
    )
    arguments: Any = key(
        None, "_target_: further arguments; each may also be a key of this group", trajectory=True
    )
    kind: OptimKind = key(OptimKind.adamw, "adamw, sgd, lion or muon", trajectory=True)
    lr: float = key(3e-3, "peak learning rate", trajectory=True, gt=0)
    beta1: float = key(0.9, "decay of the first moment", trajectory=True, ge=0, lt=1)
    beta2: float = key(0.95, "decay of the second moment", trajectory=True, ge=0, lt=1)
    eps: float = key(1e-8, "AdamW's epsilon", trajectory=True, gt=0)
    weight_decay: float = key(0.1, "on parameters of two or more dims", trajectory=True, ge=0)
    momentum: float = key(0.95, "sgd and muon: decay of the momentum", trajectory=True, ge=0, lt=1)
    ema: float | None = key(
        None,
        "keep an average of the weights with this decay, for evaluation and export; null: none",
        trajectory=True,
        gt=0,
        lt=1,
    )
    groups: Any = key(
        [],
        "[{match: REGEX, rate: 0.1, weight_decay: 0}, ...]: parameters whose name contains a match "
        "get this factor of the rate, and this decay; the first matching rule counts",
        trajectory=True,
    )
    clip: float = key(
        1.0, "gradients are scaled to at most this global norm; 0: off", trajectory=True, ge=0
    )


@dataclass(slots=True, kw_only=True)
class ScheduleConfig:
    """The learning rate as a function of applied updates.

    With ``_target_`` every key of this group that is not in the table is an argument of that code.
    """

    _target_: str | None = key(
        None,
        "a function of your own, such as pkg.rate: called with updates (their number) and the "
        "other keys, returns the learning rate (see docs/optimizers.md); null: as kind says",
        trajectory=True,
    )
    arguments: Any = key(
        None, "_target_: further arguments; each may also be a key of this group", trajectory=True
    )
    kind: ScheduleKind = key(
        ScheduleKind.cosine, "cosine, wsd, linear or constant", trajectory=True
    )
    warmup: int = key(20, "updates of linear warm-up", trajectory=True, ge=0)
    decay: float = key(
        0.2, "wsd: share of all updates in the final decay", trajectory=True, gt=0, le=1
    )
    floor: float = key(0.1, "final rate as a share of the peak", trajectory=True, ge=0, le=1)
    total: int | None = key(
        None, "number of updates of the whole schedule; null: steps", trajectory=True, ge=1
    )


@dataclass(slots=True, kw_only=True)
class GuardConfig:
    """What counts as trouble, and how much of it is survived before asking a person."""

    enabled: bool = key(
        True, "false: no gate, no judge, no rollback (for comparison only)", trajectory=True
    )
    sync: bool | None = key(
        None,
        "true: read a step's numbers before the next step begins; false: one step later, so that "
        "nothing waits for the device; null: true on CPU, false on CUDA. The run is the same",
    )
    window: int = key(64, "number of clean steps in the statistics", trajectory=True, ge=4)
    min_history: int = key(
        20,
        "number of clean steps before spikes and drifts are judged; non-finite values always are",
        trajectory=True,
        ge=4,
    )
    loss_sigmas: float = key(
        15.0,
        "spike: one loss this many robust sigmas above the level (of the window, and of the last "
        "5 steps); lower discards hard batches: those of a healthy GPT-2 reach 9",
        trajectory=True,
        gt=0,
    )
    loss_floor: float = key(
        0.4,
        "and at least this many nats per token; hard batches of a healthy GPT-2 reach 0.36",
        trajectory=True,
        ge=0,
    )
    pair_sigmas: float = key(
        3.0,
        "spike: the second of two losses in a row that lie this many robust sigmas above the level",
        trajectory=True,
        gt=0,
    )
    pair_floor: float = key(
        0.25,
        "and at least this many nats each (beyond the window's highest losses); finds small jumps "
        "that last, by their second step",
        trajectory=True,
        ge=0,
    )
    norm_sigmas: float = key(
        13.0,
        "spike: log grad norm above its median by this many robust sigmas",
        trajectory=True,
        gt=0,
    )
    norm_floor: float = key(
        2.3,
        "and by at least this much; 2.3 is 10 times the median, healthy norms reach 8 times",
        trajectory=True,
        ge=0,
    )
    drift_slack: float = key(
        0.12,
        "drift: nats above the best recent level that are forgiven (at least one robust sigma)",
        trajectory=True,
        ge=0,
    )
    drift_nats: float = key(
        4.0,
        "drift: summed excess, in nats x steps, that raises the alarm; healthy runs reach 0.7",
        trajectory=True,
        gt=0,
    )
    drift_rise: float = key(
        0.2,
        "and the median of the newest 16 losses must lie this many nats above the best level: "
        "shallower waves, such as those of epochs, are left alone",
        trajectory=True,
        ge=0,
    )
    persist: int = key(
        3, "bad steps among the last persist_window that force a rollback", trajectory=True, ge=1
    )
    persist_window: int = key(10, "number of attempted steps for persist", trajectory=True, ge=1)
    remedy: RemedyKind = key(
        RemedyKind.verdict,
        "verdict: a step with a transient fault is redone and nothing is skipped, of bad data "
        "only the culprits are skipped (see explain); discard: a bad step is always discarded",
        trajectory=True,
    )
    skip: bool = key(
        True,
        "false: after a rollback the same samples are read again (for comparison only)",
        trajectory=True,
    )
    margin: int = key(
        1, "number of steps before the onset whose samples are skipped, too", trajectory=True, ge=0
    )
    ahead: int = key(
        0,
        "number of steps after the last bad one whose samples are skipped, too",
        trajectory=True,
        ge=0,
    )
    back: int = key(0, "roll back at least this many steps before the onset", trajectory=True, ge=0)
    repeat_window: int = key(
        200,
        "trouble within so many steps after a rollback counts as a repeat",
        trajectory=True,
        ge=1,
    )
    widen: float = key(2.0, "each repeat skips this many times as far ahead", trajectory=True, ge=1)
    cooldown: float = key(
        0.5,
        "learning-rate factor from the second repeat on; if the data is suspected, only at the "
        "last rollback before a halt",
        trajectory=True,
        gt=0,
        le=1,
    )
    cooldown_steps: int = key(
        100, "number of updates for which the factor lasts", trajectory=True, ge=0
    )
    level_steps: int = key(
        20, "finite, level bad steps in a row that become the new baseline", trajectory=True, ge=2
    )
    level_spread: float = key(
        0.1,
        "steps are level if their robust sigma is below this share of their median",
        trajectory=True,
        gt=0,
    )
    max_rollbacks: int = key(
        5, "rollbacks within budget_window before the run halts", trajectory=True, ge=0
    )
    budget_window: int = key(
        1000, "number of applied steps for max_rollbacks", trajectory=True, ge=1
    )
    max_discards: int = key(
        100,
        "discarded steps in a row without a rollback before the run halts",
        trajectory=True,
        ge=1,
    )


@dataclass(slots=True, kw_only=True)
class CheckpointConfig:
    """The ring."""

    every: int | str = key(
        50, "steps between checkpoints; auto: chosen by their cost", choices=("auto",), ge=1
    )
    auto_most: int = key(1000, "every=auto: at most so many steps; at least clean_after", ge=1)
    mtbf_hours: float | None = key(
        None,
        "every=auto: hours between failures of the whole job, before any is seen; null: 24, or "
        "6,300 divided by the number of nodes if that is less",
        gt=0,
    )
    clean_after: int = key(10, "clean steps in a row that prove a checkpoint; at most every", ge=1)
    keep: int = key(
        3, "clean checkpoints kept; for a while more, if a rollback may need them", ge=1
    )
    keep_every: int = key(
        0, "also keep the checkpoint of every so many steps for good; 0: none", ge=0
    )
    keep_best: bool = key(
        False, "also save and keep the checkpoint with the best held-out loss (eval.every)"
    )
    background: bool = key(True, "write in the background during training")
    write_mib_per_second: float = key(
        0.0, "limit of what each rank writes to disk during training; 0: no limit", ge=0
    )
    memory_every: int | None = key(
        None,
        "steps between snapshots in memory; null: 10 if they fit, or more if they are costly; 0: "
        "none",
        ge=0,
    )
    memory_slots: int | None = key(
        None, "number of snapshots held in memory; null: as many as clean_after needs", ge=2
    )
    memory_limit_gib: float | None = key(
        None, "memory of a node for snapshots; null: half of what is free", gt=0
    )
    memory_mirror: bool = key(False, "also keep each snapshot in the memory of another node")
    remote: str | None = key(
        None, "fsspec URL to which clean checkpoints are copied: s3://bucket/prefix; null: off"
    )
    remote_keep: int = key(3, "clean checkpoints kept at remote, besides those of keep_every", ge=1)
    remote_wait_seconds: float = key(
        60.0,
        "how long a start waits for remote to answer, and an end for uploads to finish",
        gt=0,
        le=1200,
    )


@dataclass(slots=True, kw_only=True)
class EvalConfig:
    """Held-out loss on a fixed set."""

    every: int = key(100, "steps between evaluations; 0: never", ge=0)
    samples: int = key(64, "held-out sequences", ge=1)


@dataclass(slots=True, kw_only=True)
class DebugConfig:
    """What torch.distributed and NCCL check and print."""

    kind: DebugKind = key(DebugKind.off, "off, nccl or collectives")
    nccl_subsystems: str = key("INIT,COLL,ENV", "NCCL_DEBUG_SUBSYS when kind is nccl")
    replica_check_every: int = key(
        0, "steps between comparisons of replicated state, bit by bit; 0: never", ge=0
    )
    preflight: bool = key(
        True,
        "each start checks on a few samples whether the model looks ahead, whether earlier tokens "
        "matter, whether each trained tensor gets a gradient, and an untrained model's first loss; "
        "a failed check is journalled",
    )
    audit_every: int = key(
        500,
        "updates between audits: all ranks compute one rank's micro-batch, and the bits are "
        "compared; finds a device that computes wrong numbers without an error; 0: never",
        ge=0,
    )
    check_devices: bool = key(
        True, "each start tests every rank's device: equal ones must give equal bits; NVML is asked"
    )
    diagnose_on_crash: bool = key(
        False, "a supervisor restarts once with debug=collectives after an unexplained crash"
    )


@dataclass(slots=True, kw_only=True)
class WatchdogConfig:
    """When a rank that does not move is taken for hung."""

    enabled: bool = key(True, "false: only the collectives' own time-out ends a hang")
    floor_seconds: float = key(120.0, "no step counts as hung before this", gt=0)
    factor: float = key(20.0, "nor before this many times the median step time", ge=1)
    slow_seconds: float = key(
        1800.0,
        "no start, first step, save, evaluation or rollback counts as hung before this",
        gt=0,
    )
    settle_seconds: float = key(
        3.0, "how long a rank waits for the others' evidence before it ends", ge=0
    )
    straggler_every: int = key(50, "steps between comparisons of the ranks' speed; 0: never", ge=0)
    straggler_factor: float | None = key(
        None,
        "a rank slower than the median by this factor is journalled; null: 2, and 1.2 for the "
        "fixed computation on a GPU, for which a throttled one needs 10-40 % longer",
        gt=1,
    )
    straggler_checks: int = key(
        3, "number of comparisons in a row in which it must be slower", ge=1
    )


@dataclass(slots=True, kw_only=True)
class PreemptConfig:
    """How a run handles a request to stop."""

    grace_seconds: float = key(
        25.0, "from the signal to the exit; a save that takes longer is given up", gt=0
    )
    margin_seconds: float = key(
        120.0, "stop by itself so long before the scheduler's time limit", ge=0
    )


@dataclass(slots=True, kw_only=True)
class TrackConfig:
    """Where numbers go besides metrics.jsonl.

    With ``_target_`` every key of this group that is not in the table is an argument of that code.
    """

    _target_: str | None = key(
        None,
        "a tracker of your own, such as pkg.Tracker: called with the other keys (see "
        "docs/trackers.md); null: none",
    )
    arguments: Any = key(None, "_target_: further arguments; each may also be a key of this group")
    log: LogKind = key(
        LogKind.text,
        "console output: text for a person; json: an object a line, for a log pipeline",
    )
    tensorboard: bool = key(False, "write TensorBoard scalars to out/tensorboard")
    wandb: bool = key(False, "log to Weights & Biases; WANDB_MODE=offline writes to out/wandb")
    mlflow: bool = key(
        False, "log to MLflow at MLFLOW_TRACKING_URI; without one to files in out/mlruns"
    )
    project: str = key("holdfast", "wandb: project of the run; mlflow: its experiment")
    unwritten_seconds: float = key(
        300.0,
        "how long lines that cannot be written to metrics.jsonl or journal.jsonl (full disk) are "
        "kept in memory before the run stops with 75",
        ge=0,
    )
    command: str | None = key(
        None,
        "a shell command that is run for each incident, with the journal line as JSON on its "
        "standard input; nothing waits for it",
    )
    report_minutes: float | None = key(
        10.0,
        "minutes between writings of out/report.html, the page of the run; 0: only at its end; "
        "null: never",
        ge=0,
    )
    read: bool = key(
        True,
        "read the run's own curve at evaluations, and journal each signature of trouble "
        "once; it changes nothing",
    )
    layers_every: int = key(
        50,
        "updates between measurements inside the model, for out/layers.jsonl and early "
        "warnings; 0: never",
        ge=0,
    )
    every: int = key(10, "steps between console lines if the output is not a terminal", ge=1)
    peak_tflops: float | None = key(
        None, "peak of one device, for MFU; null: from the device's name", gt=0
    )


@dataclass(slots=True, kw_only=True)
class ResumeConfig:
    """What a second command on the same out may change."""

    allow: list[str] = key(
        [],
        "settings, or groups of them, that may change although the result changes: "
        "[optim.lr,schedule.total]; each change is journalled",
    )
    allow_change: bool = key(False, "allow any change of settings and data")
    take_over: bool = key(False, "take the run from a living launch, which then stops")
    stale_seconds: float = key(
        10.0,
        "an owner without a heartbeat for so long is gone; one that has ended, at once",
        ge=5,
    )
    without_remote: bool = key(
        False, "begin anew in an out without checkpoints although checkpoint.remote does not answer"
    )


@dataclass(slots=True, kw_only=True)
class RunConfig:
    """All settings of a run."""

    out: str = key("runs/default", "directory of the run; the same command again resumes it")
    steps: int = key(250, "applied updates", ge=1)
    seed: int = key(0, "seed of weights, sample order and dropout", trajectory=True, ge=0)
    model: ModelConfig = key(ModelConfig, "the network")
    compute: ComputeConfig = key(ComputeConfig, "how the network is computed")
    data: DataConfig = key(DataConfig, "the corpus")
    batch: BatchConfig = key(BatchConfig, "sizes of batches")
    parallel: ParallelConfig = key(ParallelConfig, "the engine")
    optim: OptimConfig = key(OptimConfig, "the optimizer")
    schedule: ScheduleConfig = key(ScheduleConfig, "the learning rate")
    guard: GuardConfig = key(GuardConfig, "judgement and recovery")
    explain: ExplainKind = key(
        ExplainKind.quick,
        "quick: find out why a step was bad by up to 10 further computations of it, in all "
        "for at most 0.5 % of the run's steps (or 60 if that is more); full: up to 300, and 5 %; "
        "off: never",
        trajectory=True,
    )
    checkpoint: CheckpointConfig = key(
        CheckpointConfig, "when checkpoints are made, proven and kept"
    )
    eval: EvalConfig = key(EvalConfig, "held-out loss")
    debug: DebugConfig = key(DebugConfig, "checks of collectives, devices and replicas")
    track: TrackConfig = key(TrackConfig, "where numbers go besides metrics.jsonl")
    watchdog: WatchdogConfig = key(WatchdogConfig, "hung and slow ranks")
    preempt: PreemptConfig = key(PreemptConfig, "requests to stop")
    resume: ResumeConfig = key(ResumeConfig, "what a second command on the same out may change")
    faults: list[str] = key([], "faults on purpose, for drills; see docs/testing.md")

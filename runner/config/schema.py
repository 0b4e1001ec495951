"""The typed schema of a run: every key, its type, unit, default and bounds stand here only.

YAML under ``configs/`` selects and overrides these fields; :mod:`runner.config.compose` turns the
command line into one :class:`RunConfig`. This module knows nothing of torch, Hydra or files.

Each field carries metadata: ``help`` (one line for ``--help`` and docs/configuration.md), bounds
(``ge``, ``gt``, ``le``, ``lt``), and ``trajectory``: whether changing it changes what the
run computes, so that resuming with another value must be refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Final


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


def exact(default: Any, help: str, **more: Any) -> Any:
    """A key that changes what the run computes: resuming with another value is refused."""
    return key(default, help, trajectory=True, **more)


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


class Goal(Enum):
    lowest = "lowest"
    highest = "highest"


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
    """A pre-norm decoder: RMSNorm, RoPE, SwiGLU; a Hugging Face model; or one of your own."""

    _target_: str | None = exact(
        None,
        "a model of your own, such as pkg.Net: called with the other keys of this group, returns a "
        "torch module (see docs/models.md); null: the decoder",
    )
    arguments: Any = exact(None, "_target_: further arguments")
    # Any type: beside _target_ they are arguments, of whatever type that code wants.
    kind: Any = exact(
        "decoder",
        "decoder: this package's own; hf: the Hugging Face model in the folder path",
        shown="decoder | hf",
    )
    path: Any = exact(
        None,
        "hf: a local folder with config.json, *.safetensors and the tokenizer's files",
        shown="str | null",
    )
    init: Any = exact(
        "weights",
        "hf: weights: those of the folder; random: fresh ones, from its config.json alone",
        shown="weights | random",
    )
    lora: Any = exact(
        None,
        "hf: train low-rank adapters only, by PEFT: {r: 8, targets: [q_proj, v_proj], alpha: 16, "
        "dropout: 0.0, rslora: false}; null: train all weights",
        shown="mapping | null",
    )
    quantize: Any = exact(
        None,
        "hf with lora: hold the frozen linear layers in 4 or 8 bits, by bitsandbytes (see "
        "docs/hugging-face.md); null: as they are",
        shown="nf4 | fp4 | int8 | null",
    )
    dim: int = exact(128, "width of the residual stream", ge=2)
    layers: int = exact(4, "number of blocks", ge=1)
    heads: int = exact(4, "attention heads; must divide dim", ge=1)
    kv_heads: int | None = exact(
        None, "key/value heads (grouped-query attention); null: as many as heads", ge=1
    )
    ffn_dim: int | None = exact(
        None, "hidden width of SwiGLU; null: 8/3 dim rounded up to 64", ge=1
    )
    vocab_size: int | None = exact(None, "rows of the embedding; null: what the data needs", ge=2)
    tied_head: bool = exact(True, "the output head reuses the embedding")
    qk_norm: bool = exact(False, "RMSNorm on queries and keys")
    norm_eps: float = exact(1e-5, "epsilon of RMSNorm", gt=0)
    rope_theta: float = exact(10000.0, "base of the rotary frequencies", gt=0)
    rope_scaling: Any = exact(
        None,
        "Llama 3's scaling of the rotary frequencies: {factor: 8, low_freq_factor: 1, "
        "high_freq_factor: 4, original_max_position_embeddings: 8192}; null: none",
        shown="mapping | null",
    )
    dropout: float = exact(0.0, "dropout after attention and feed-forward", ge=0, lt=1)
    z_loss: float = exact(0.0, "weight of logsumexp(logits)^2 in the training loss", ge=0)
    init_std: float = exact(0.02, "standard deviation of the initial weights", gt=0)
    loss_chunk_mib: float = key(
        512.0,
        "logits that take more than this in FP32 are computed in such parts, and again in "
        "backward: less memory, the same losses; 0: never",
        ge=0,
    )


# Of the decoder and of ``kind: hf``: beside ``_target_`` they are arguments like any other.
DECODER_KEYS = frozenset(spec.name for spec in fields(ModelConfig)) - {
    "_target_",
    "arguments",
    "loss_chunk_mib",
}


@dataclass(slots=True, kw_only=True)
class ComputeConfig:
    """How a model is computed, the decoder or one of your own."""

    precision: Precision = exact(
        Precision.auto,
        "type of forward and backward: bf16, fp32, or auto: bf16 if all ranks have it in hardware "
        "when the run begins, else fp32",
    )
    compile: bool = key(False, "torch.compile each block")
    recompute: Recompute = key(
        Recompute.none,
        "blocks: recompute the activations of blocks in backward and keep none; selective: "
        "keep only the results of products and attention; none: keep all",
    )
    frozen: list[str] = exact(
        [], "regular expressions found in the names of parameters not to train"
    )
    deterministic: bool = exact(
        False,
        "make a GPU repeat bits (settings of torch, cuBLAS, Inductor and NCCL), which can be "
        "slower; the start line says whether this machine repeats bits",
    )
    document_attention: DocumentAttention = exact(
        DocumentAttention.auto,
        "decoder, if data keeps documents apart: mask (of all pairs of tokens), flex "
        "(torch's flex attention, without one), or auto: flex on CUDA, else mask",
    )


@dataclass(slots=True, kw_only=True)
class DataConfig:
    """Where samples come from: windows of ``seq_len + 1`` tokens, or code of your own."""

    _target_: str | None = exact(
        None,
        "code of your own, such as pkg.open_data: called with the other keys, returns a data set "
        "(see docs/data.md); null: as kind says",
    )
    arguments: Any = exact(None, "_target_: further arguments")
    kind: DataKind = exact(DataKind.text, "what is read")
    path: Any = exact(
        [],
        "a file or directory, or a list of them; python:library (data=python): the source of "
        "Python's standard library",
    )
    val_path: Any = exact(
        None,
        "files for the held-out loss, or several sets by name: {wiki: A, code: B}; null: a part of "
        "path (held_out)",
    )
    sources: Any = exact(
        None,
        "a mixture: [{path: A, weight: 2, name: a}, ...]; the other keys of the group apply to all "
        "sources (see docs/data.md)",
    )
    suffixes: list[str] = exact(
        [".py", ".txt", ".md", ".jsonl", ".rst", ".c", ".h"],
        "text: file name endings read from directories; .jsonl and .csv also for their compressed "
        "forms",
    )
    # Not part of the trajectory: its effect is in the corpus' fingerprint, and runs begun without
    # the key, on files that have no such lines, go on.
    field: str | None = key(
        "text",
        "text: field of a .jsonl line, or column of a .parquet or .csv file, that holds the "
        "document; null: .jsonl and .csv files are plain text. "
        "hf: column of a row's text, if there is no input_ids",
    )
    messages: str | None = exact(
        None, "hf: column of a row's chat, a list of {role, content} (see docs/data.md)"
    )
    pack: bool | None = exact(
        None,
        "true: pack short samples into full windows, without attention between them; "
        "for hf and _target_",
    )
    tokenizer: str | None = exact(
        None, "text: a Hugging Face tokenizer.json or its folder; null: bytes (256 and an end mark)"
    )
    token_dtype: TokenDtype = exact(
        TokenDtype.auto, "tokens: type of a raw file; .npy and .idx files name theirs"
    )
    vocab_size: int | None = exact(
        None,
        "tokens, synthetic: number of token ids; required for tokens. text, hf: fewer than the "
        "tokenizer has",
        ge=2,
    )
    seq_len: int = exact(256, "tokens the model sees per sequence", ge=1)
    end_token: int | str | None = exact(
        None,
        "the token that ends a document. text: its id or text; null: as the tokenizer's files say. "
        "tokens: its id, for isolate_documents",
    )
    begin_token: int | str | None = exact(
        None,
        "text: id or text of the token put before each document; null: as the tokenizer's files "
        "say; empty: none",
    )
    isolate_documents: bool = exact(False, "attention does not cross document boundaries")
    held_out: float = exact(0.01, "share of samples kept out of training, by hash", ge=0, lt=1)
    samples: int = exact(100_000, "synthetic: number of samples", ge=1)
    skip: list[Any] = exact([], "sample positions never read: [[a,b],...], half open")
    cache: str | None = key(
        None, "directory of the token cache; null: under the user's cache directory"
    )
    max_unreadable: int = key(
        100, "different unreadable samples that may be skipped; one more ends the run", ge=0
    )
    retry_seconds: float = key(
        5.0, "how long reading a sample is retried after an error of the system", ge=0
    )
    workers: int = key(1, "loader processes per rank; 0: load in the training process", ge=0)


@dataclass(slots=True, kw_only=True)
class BatchConfig:
    """Sizes in sequences. The global batch does not depend on the world size."""

    global_size: int = exact(32, "sequences per step over all ranks", ge=1)
    micro_size: int = key(16, "sequences per forward/backward on one rank", ge=1)


@dataclass(slots=True, kw_only=True)
class ParallelConfig:
    """How parameters are laid out over ranks."""

    kind: ParallelKind = key(ParallelKind.fsdp, "the engine")
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
    """Fused AdamW, or another; decay only on matrices."""

    _target_: str | None = exact(
        None,
        "an optimizer of your own, such as torch.optim.NAdam: called with params, lr and the other "
        "keys (see docs/optimizers.md); null: as kind says",
    )
    arguments: Any = exact(None, "_target_: further arguments")
    kind: OptimKind = exact(OptimKind.adamw, "the optimizer")
    lr: float = exact(3e-3, "peak learning rate", gt=0)
    beta1: float = exact(0.9, "decay of the first moment", ge=0, lt=1)
    beta2: float = exact(0.95, "decay of the second moment", ge=0, lt=1)
    eps: float = exact(1e-8, "AdamW's epsilon", gt=0)
    weight_decay: float = exact(0.1, "on parameters of two or more dims", ge=0)
    momentum: float = exact(0.95, "sgd and muon: decay of the momentum", ge=0, lt=1)
    ema: float | None = exact(
        None,
        "keep an average of the weights with this decay, for evaluation and export; null: none",
        gt=0,
        lt=1,
    )
    groups: Any = exact(
        [],
        "[{match: REGEX, rate: 0.1, weight_decay: 0}, ...]: parameters whose name contains a match "
        "get this factor of the rate, and this decay; the first matching rule counts",
    )
    clip: float = exact(1.0, "gradients are scaled to at most this global norm; 0: off", ge=0)


@dataclass(slots=True, kw_only=True)
class ScheduleConfig:
    """The learning rate as a function of applied updates."""

    _target_: str | None = exact(
        None,
        "a function of your own, such as pkg.rate: called with updates (their number) and the "
        "other keys, returns the learning rate (see docs/optimizers.md); null: as kind says",
    )
    arguments: Any = exact(None, "_target_: further arguments")
    kind: ScheduleKind = exact(ScheduleKind.cosine, "the curve")
    warmup: int = exact(20, "updates of linear warm-up", ge=0)
    decay: float = exact(0.2, "wsd: share of all updates in the final decay", gt=0, le=1)
    floor: float = exact(0.1, "final rate as a share of the peak", ge=0, le=1)
    total: int | None = exact(None, "number of updates of the whole schedule; null: steps", ge=1)


@dataclass(slots=True, kw_only=True)
class GuardConfig:
    """What counts as trouble, and how much of it is survived before asking a person."""

    enabled: bool = exact(True, "false: no gate, no judge, no rollback (for comparison only)")
    sync: bool | None = key(
        None,
        "true: read a step's numbers before the next step begins; false: one step later, so that "
        "nothing waits for the device; null: true on CPU, false on CUDA. The run is the same",
    )
    window: int = exact(64, "clean steps in the statistics", ge=4)
    min_history: int = exact(
        20, "clean steps before spikes and drifts are judged; non-finite values always are", ge=4
    )
    loss_sigmas: float = exact(
        15.0,
        "spike: one loss this many robust sigmas above the level (of the window, and of the last "
        "5 steps)",
        gt=0,
    )
    loss_floor: float = exact(
        0.4,
        "and at least this many nats per token; the limits of two high losses in a row and of a "
        "drift are shares of it",
        ge=0,
    )
    norm_floor: float = exact(
        2.3,
        "spike: log grad norm above its median by this and 13 robust sigmas; 2.3: 10 times",
        ge=0,
    )
    drift_nats: float = exact(
        4.0,
        "drift: summed excess, in nats x steps, that raises the alarm; healthy runs reach 0.7",
        gt=0,
    )
    persist: int = exact(
        3, "bad steps among the last 10 (or 2 persist, if that is more) that force a rollback", ge=1
    )
    remedy: RemedyKind = exact(
        RemedyKind.verdict,
        "verdict: a step with a transient fault is redone and nothing is skipped, of bad data "
        "only the culprits are skipped (see explain); discard: a bad step is always discarded",
    )
    margin: int = exact(1, "steps before the onset whose samples are skipped, too", ge=0)
    ahead: int = exact(0, "steps after the last bad one whose samples are skipped, too", ge=0)
    back: int = exact(0, "roll back at least this many steps before the onset", ge=0)
    cooldown_steps: int = exact(
        100,
        "from the second repeat on, updates at half the learning rate; if the data is suspected, "
        "only at the last rollback before a halt; 0: none",
        ge=0,
    )
    level_steps: int = exact(
        20, "finite, level bad steps in a row that become the new baseline", ge=2
    )
    max_rollbacks: int = exact(5, "rollbacks within 1,000 updates before the run halts", ge=0)


@dataclass(slots=True, kw_only=True)
class CheckpointConfig:
    """The ring."""

    every: int | str = key(
        50, "steps between checkpoints; auto: chosen by their cost", choices=("auto",), ge=1
    )
    auto_most: int = key(1000, "every=auto: at most so many steps; at least clean_after", ge=1)
    clean_after: int = key(10, "clean steps in a row that prove a checkpoint; at most every", ge=1)
    keep: int = key(
        3,
        "clean checkpoints kept, here and at remote; for a while more, if a rollback may need them",
        ge=1,
    )
    keep_every: int = key(
        0, "also keep the checkpoint of every so many steps for good; 0: none", ge=0
    )
    keep_best: bool = key(
        False, "also save and keep the checkpoint with the best eval.metric (eval.every)"
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
    metric: str = key(
        "eval_loss",
        "the held-out number that stop_after and checkpoint.keep_best go by: a column of "
        "metrics.jsonl, such as eval_loss/NAME of a set, or eval_accuracy",
    )
    goal: Goal = key(Goal.lowest, "which value of metric is the best")
    stop_after: int = key(
        0,
        "evaluations in a row, no better than the best before, after which the run ends; 0: never",
        ge=0,
    )


@dataclass(slots=True, kw_only=True)
class DebugConfig:
    """What torch.distributed and NCCL check and print."""

    kind: DebugKind = key(DebugKind.off, "what is checked")
    replica_check_every: int = key(
        0, "steps between comparisons of replicated state, bit by bit; 0: never", ge=0
    )
    preflight: bool = key(
        True,
        "each start checks the model on a few samples (see docs/preflight.md); a failed check is "
        "journalled",
    )
    audit_every: int = key(
        500,
        "updates between audits (see docs/warnings.md), which find a device that computes wrong "
        "numbers without an error; 0: never",
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
    floor_seconds: float = key(
        120.0, "no step counts as hung before this, nor before 20 times the median step time", gt=0
    )
    slow_seconds: float = key(
        1800.0,
        "no start, first step, save, evaluation or rollback counts as hung before this",
        gt=0,
    )
    straggler_every: int = key(50, "steps between comparisons of the ranks' speed; 0: never", ge=0)


@dataclass(slots=True, kw_only=True)
class PreemptConfig:
    """How a run handles a request to stop."""

    grace_seconds: float = key(
        25.0, "from the signal to the exit; a save that takes longer is given up", gt=0
    )
    margin_seconds: float = key(
        120.0, "stop by itself so long before the scheduler's time limit", ge=0
    )
    notice: str = key(
        "auto",
        "who says that a machine is taken back: aws, gcp, azure, file:PATH, a URL; auto: the "
        "cloud it runs in; none",
    )


@dataclass(slots=True, kw_only=True)
class LaunchConfig:
    """How ``launch`` and ``supervise`` start the ranks."""

    warm: bool = key(
        True,
        "import what the ranks need once per node, and fork them; false: each imports it itself",
    )
    preload: list[str] = key(
        [], "modules of yours to import once as well; they may start no thread and touch no GPU"
    )


@dataclass(slots=True, kw_only=True)
class ClusterConfig:
    """What is remembered of the machines, over all runs (see docs/clusters.md)."""

    nodes: str | None = key(
        None,
        "a folder on a shared disk, which several jobs may use: what happened to each host; "
        "others are preferred to one that failed; null: nothing is remembered",
    )
    remember_days: float = key(30.0, "how long others are preferred after a fault", ge=0)
    patience_seconds: float = key(
        120.0, "how long the run does not move before a host that failed takes part", ge=0
    )
    burn_in_seconds: float = key(
        30.0, "how long the devices of a host that failed are checked before it takes part", ge=0
    )


@dataclass(slots=True, kw_only=True)
class TrackConfig:
    """Where numbers go besides metrics.jsonl."""

    _target_: str | None = key(
        None,
        "a tracker of your own, such as pkg.Tracker: called with the other keys (see "
        "docs/trackers.md); null: none",
    )
    arguments: Any = key(None, "_target_: further arguments")
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
        "how long lines that cannot be written (full disk) are kept before the run stops with 75",
        ge=0,
    )
    command: str | None = key(
        None,
        "a shell command for each episode of trouble and its end, with a message as JSON on its "
        "standard input",
    )
    watch: bool = key(
        False,
        "launch and supervise start a watcher (holdfast watch), which runs track.command instead "
        "of the first rank, also when all ranks and the launcher have died",
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
        10.0, "an owner without a heartbeat for so long is gone; one that has ended, at once", ge=5
    )
    without_remote: bool = key(
        False, "begin anew in an out without checkpoints although checkpoint.remote does not answer"
    )


@dataclass(slots=True, kw_only=True)
class RunConfig:
    """All settings of a run."""

    out: str = key("runs/default", "directory of the run; the same command again resumes it")
    steps: int = key(250, "applied updates", ge=1)
    epochs: float | None = key(
        None,
        "passes over the training data, in place of steps, which each start computes and prints; "
        "null: steps",
        gt=0,
    )
    seed: int = exact(0, "seed of weights, sample order and dropout", ge=0)
    model: ModelConfig = key(ModelConfig, "the network")
    compute: ComputeConfig = key(ComputeConfig, "how the network is computed")
    data: DataConfig = key(DataConfig, "the corpus")
    batch: BatchConfig = key(BatchConfig, "sizes of batches")
    parallel: ParallelConfig = key(ParallelConfig, "the engine")
    optim: OptimConfig = key(OptimConfig, "the optimizer")
    schedule: ScheduleConfig = key(ScheduleConfig, "the learning rate")
    guard: GuardConfig = key(GuardConfig, "judgement and recovery")
    explain: ExplainKind = exact(
        ExplainKind.quick,
        "quick: find out why a step was bad by up to 10 computations of it, and at most 0.5 % of "
        "the run's steps in all (60, if that is more); full: 300, and 5 %; off: never",
    )
    checkpoint: CheckpointConfig = key(
        CheckpointConfig, "when checkpoints are made, proven and kept"
    )
    eval: EvalConfig = key(EvalConfig, "held-out loss")
    debug: DebugConfig = key(DebugConfig, "checks of collectives, devices and replicas")
    track: TrackConfig = key(TrackConfig, "where numbers go besides metrics.jsonl")
    watchdog: WatchdogConfig = key(WatchdogConfig, "hung and slow ranks")
    preempt: PreemptConfig = key(PreemptConfig, "requests to stop")
    launch: LaunchConfig = key(LaunchConfig, "how launch and supervise start the ranks")
    cluster: ClusterConfig = key(ClusterConfig, "what is remembered of the machines")
    resume: ResumeConfig = key(ResumeConfig, "what a second command on the same out may change")
    faults: list[str] = key([], "faults on purpose, for drills; see docs/testing.md")


# Keys of earlier versions: what a command that has one is told.
RENAMED: Final = {
    "model.precision": "compute.precision",
    "model.compile": "compute.compile",
    "model.frozen": "compute.frozen",
    "model.activation_checkpointing": "compute.recompute",
}
# What nobody had a reason to turn is a constant now.
_FIXED: Final = {
    "model.loss_fp32": "true",
    "compute.loss_fp32": "true",
    "guard.pair_sigmas": "3.0",
    "guard.level_spread": "0.1",
    "guard.repeat_window": "200",
    "guard.budget_window": "1000",
    "guard.max_discards": "100",
    "guard.drift_rise": "0.5 guard.loss_floor",
    "guard.skip": "true",
    "guard.widen": "2.0",
    "data.prefetch": "2",
    "data.pin_memory": "true on CUDA",
    "guard.pair_floor": "0.625 guard.loss_floor",
    "guard.norm_sigmas": "13; guard.norm_floor may be set",
    "guard.drift_slack": "0.3 guard.loss_floor",
    "guard.persist_window": "10, or 2 guard.persist if that is more",
    "guard.cooldown": "0.5; guard.cooldown_steps=0 leaves the rate as it is",
    "checkpoint.mtbf_hours": "24, or 6,300 divided by the number of nodes if that is less",
    "checkpoint.remote_keep": "as checkpoint.keep says",
    "debug.nccl_subsystems": "INIT,COLL,ENV; NCCL_DEBUG_SUBSYS in the environment comes before it",
    "watchdog.factor": "20",
    "watchdog.settle_seconds": "3",
    "watchdog.straggler_factor": "2, and 1.2 for the fixed computation on a GPU",
    "watchdog.straggler_checks": "3",
}


def former_key(key: str) -> str | None:
    """What became of a key; None if it never was one."""
    if key in RENAMED:
        return f"is now called {RENAMED[key]}"
    return f"is no setting any more; it is always {_FIXED[key]}" if key in _FIXED else None

"""Settings of other trainers, and ours.

Of Hugging Face, Lightning, torchtitan, Composer, Axolotl and nanoGPT. An unknown key is answered
with the key that does the same here. Nothing is renamed silently: a value may have another unit.
"""

from __future__ import annotations

import re
from typing import Final

_BATCH = (
    "batch.global_size counts the samples of a step over all ranks, and batch.micro_size those of "
    "one forward pass; how often gradients accumulate follows from both and the number of ranks"
)
RESUME: Final = "the same command with the same out=DIR resumes by itself"
_PRECISION = "compute.precision=bf16, fp32, or auto (default)"
_EPOCHS = "epochs, in place of steps; each pass has an order of its own"
_HALF = (
    "compute.precision is bf16 or fp32; FP16 with a loss scaler is guarded in a loop of your own "
    "or under the Hugging Face Trainer (docs/integrations.md)"
)
_LORA = "model.lora, such as model.lora={r: 8, targets: all-linear}"
_LOOP = "none here: put runner.Guard into a loop of your own (docs/loop.md)"

# Ours, and the names of others in lower case, with "_" for "-": without their group, or with it
# where the name alone is not enough.
NAMES: Final = (
    ("optim.lr", "learning_rate max_lr base_lr peak_lr initial_lr"),
    ("schedule.floor, a share of optim.lr", "min_lr lr_min min_lr_ratio min_lr_factor"),
    (
        "schedule.kind, or schedule=NAME",
        "lr_scheduler_type lr_scheduler scheduler decay_type lr_decay_style",
    ),
    (
        "schedule.warmup, in steps",
        "warmup_steps warmup_iters num_warmup_steps lr_warmup_iters warmup",
    ),
    ("schedule.warmup, in steps: the ratio x steps", "warmup_ratio"),
    ("schedule.total, in steps", "lr_decay_iters decay_steps lr_decay_steps"),
    (_EPOCHS, "num_train_epochs num_epochs max_epochs n_epochs"),
    ("steps, or epochs", "max_duration"),
    (
        "steps",
        "max_steps max_iters train_iters num_steps total_steps training_steps iterations "
        "num_iterations train_steps max_train_steps num_training_steps",
    ),
    ("steps: tokens / (batch.global_size x data.seq_len)", "max_tokens total_tokens train_tokens"),
    (
        f"batch.micro_size: {_BATCH}",
        "per_device_train_batch_size micro_batch_size local_batch_size device_batch_size "
        "per_gpu_batch_size device_train_microbatch_size train_micro_batch_size_per_gpu",
    ),
    (
        f"batch.global_size: {_BATCH}",
        "batch_size global_batch_size train_batch_size total_batch_size global_batch bs",
    ),
    (
        _BATCH,
        "gradient_accumulation_steps grad_accum grad_accum_steps accumulate_grad_batches "
        "gradient_accumulation accumulation_steps accumulate grad_acc",
    ),
    (
        "optim.clip",
        "max_grad_norm gradient_clip_val gradient_clip grad_clip clip_grad_norm clip_grad max_norm "
        "gradient_clipping clipping_threshold",
    ),
    ("optim.beta1", "adam_beta1 beta_1"),
    ("optim.beta2", "adam_beta2 beta_2"),
    ("optim.beta1 and optim.beta2", "betas"),
    ("optim.eps", "adam_epsilon adam_eps epsilon"),
    ("optim=NAME, such as optim=adamw", "optimizer optim_type optimizer_type optimizer_name"),
    ("optim.weight_decay", "wd decay l2"),
    (_PRECISION, "bf16 precision mixed_precision dtype torch_dtype mixed_precision_param amp"),
    (_HALF, "fp16"),
    ("none here: compute.precision says what is computed in", "tf32 fp8"),
    ("model.quantize=nf4, fp4 or int8, with model.lora", "load_in_8bit load_in_4bit"),
    (
        "compute.recompute",
        "gradient_checkpointing activation_checkpointing activation_checkpoint "
        "recompute_granularity activation_ckpt",
    ),
    ("compute.compile", "torch_compile compile_model compile"),
    (
        RESUME,
        "resume_from_checkpoint ckpt_path load_checkpoint init_from load_dir load_path "
        "auto_resume autoresume load_from_checkpoint resume_from resume_training",
    ),
    (
        "out",
        "output_dir save_folder out_dir default_root_dir save_dir dump_folder run_dir out_path "
        "logdir log_dir logging_dir checkpoint_dir ckpt_dir "
        "work_dir",
    ),
    (
        "checkpoint.every, in steps, or auto",
        "save_steps save_interval save_every save_every_n_steps ckpt_interval "
        "checkpoint_interval checkpoint_every every_n_train_steps save_strategy checkpoint.steps "
        "save_freq",
    ),
    ("checkpoint.keep", "save_total_limit save_top_k keep_latest_k keep_last max_checkpoints"),
    ("checkpoint.keep_best", "load_best_model_at_end save_best"),
    ("checkpoint.background", "async_save"),
    (
        "eval.every, in steps",
        "eval_steps eval_interval val_check_interval eval_every validation_interval eval_freq "
        "eval_strategy evaluation_strategy val_every",
    ),
    (
        "eval.stop_after, in evaluations",
        "early_stopping_patience early_stopping patience early_stopping_rounds",
    ),
    ("eval.metric, with eval.goal=lowest or highest", "metric_for_best_model monitor"),
    ("eval.goal=lowest or highest", "greater_is_better"),
    ("eval.samples", "eval_iters limit_val_batches eval_batches"),
    (
        "data.seq_len, in tokens",
        "max_seq_length seq_length block_size max_length sequence_len context_length seq_len "
        "max_seq_len sequence_length n_ctx cutoff_len ctx_length "
        "context_len",
    ),
    (
        "model=hf model.path=FOLDER; nothing is downloaded: `hf download NAME --local-dir FOLDER`",
        "model_name_or_path base_model pretrained_model_name_or_path model_name hf_model "
        "model_path model.name",
    ),
    (
        "data.path, with data=text, tokens or hf",
        "dataset dataset_name train_file data_path datasets dataset_path train_data train_files "
        "data_files data_dir data.file data.files data.dir",
    ),
    ("data.field", "text_column dataset_text_field text_field column"),
    ("data.val_path", "validation_file eval_dataset val_data val_file"),
    (
        "data.held_out, a share of the samples",
        "val_split validation_split test_size val_size val_set_size",
    ),
    ("none needed: each pass has an order of its own, made from seed", "shuffle"),
    ("data.tokenizer", "tokenizer_name tokenizer_path tokenizer"),
    ("data.workers", "dataloader_num_workers num_workers"),
    ("data.pack", "sample_packing packing"),
    (
        _LORA,
        "lora_r lora_alpha lora_dropout lora_target_modules use_lora peft adapter lora "
        "lora.r lora.alpha",
    ),
    (
        "parallel=NAME: single, ddp, fsdp, hsdp, zero1, zero2 or zero3",
        "fsdp strategy distributed_backend data_parallel_shard_degree zero_stage accelerator ddp",
    ),
    (
        "parallel=zero1, zero2 or zero3; its settings are parallel.deepspeed",
        "deepspeed zero zero_optimization",
    ),
    (
        _LOOP,
        "tensor_parallel_degree tensor_model_parallel_size pipeline_parallel_degree "
        "context_parallel_degree",
    ),
    ("parallel.offload", "cpu_offload offload_optimizer enable_cpu_offload"),
    (
        "track=tensorboard, wandb or mlflow",
        "report_to logger enable_tensorboard enable_wandb use_wandb wandb_log",
    ),
    ("track.project", "wandb_project project_name"),
    (
        "track.every",
        "logging_steps log_interval log_every_n_steps log_freq print_freq log_every "
        "logging_strategy",
    ),
    ("out: its last folder is the run's name", "run_name experiment_name name"),
    ("compute.deterministic", "deterministic_algorithms full_determinism"),
    ("model.dim", "dim hidden_size n_embd d_model embed_dim"),
    ("model.layers", "n_layer num_hidden_layers n_layers num_layers"),
    ("model.heads", "n_head num_attention_heads n_heads num_heads"),
    ("model.kv_heads", "num_key_value_heads n_kv_heads"),
    ("model.ffn_dim", "intermediate_size ffn_hidden_size d_ff"),
    ("seed", "random_seed global_seed manual_seed seed_everything random_state"),
    ("optim.ema", "ema_decay use_ema"),
    (
        "the launcher's: `holdfast launch --nproc N`, or torchrun's --nproc-per-node and --nnodes",
        "nproc_per_node nproc devices gpus num_gpus num_processes num_nodes nnodes",
    ),
    ("`holdfast export OUT DIR --format hf`, after the run", "push_to_hub hub_model_id"),
    (
        "none here: it belongs in the losses(batch) of a model of your own (docs/models.md)",
        "label_smoothing label_smoothing_factor neftune_noise_alpha",
    ),
    (
        "the scheduler's limit; preempt.margin_seconds says how long before it the run stops",
        "walltime max_time timeout time_limit",
    ),
)
_OURS: Final = {name: ours for ours, names in NAMES for name in names.split()}


def our_key(key: str) -> str | None:
    """What a key of another trainer is here; None for one that is not known."""
    plain = key.lower().replace("-", "_")
    return _OURS.get(plain, _OURS.get(plain.rpartition(".")[2]))


def likely_key(key: str, least: float) -> str | None:
    """What a key probably is here: the share of common words with a known one is ``least``."""
    typed = _words(key)
    shares = {name: len(typed & _words(name)) / len(typed | _words(name)) for name in _OURS}
    best = max(shares, key=shares.__getitem__)
    return _OURS[best] if shares[best] >= least else None


def _words(key: str) -> set[str]:
    """Its words, cut so that ``validation`` is ``valid`` and ``gradient`` is ``grad``."""
    return {word[:4] for word in re.split(r"[._-]", key.lower())}

"""More of TRL's trainers than tests/frameworks.py has, with the same arguments.

The poison of GRPO is a reward function: REWARD in the environment says what it gives for the bad
prompts: ``nan``, ``none``, ``raise``; or ``constant``, for all.
"""

from __future__ import annotations

import os
from typing import Any

from tests import frameworks
from tests.frameworks import (
    BAD_TOKEN,
    Ended,
    ScriptArguments,
    fit_hf,
    hf_arguments,
    poisoned,
    tokens,
)

BAD_WORD = f"t{BAD_TOKEN}"


def tokenizer() -> Any:
    from tokenizers import pre_tokenizers

    made = frameworks._tokenizer()
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.padding_side = "left"
    return made


def words(ids: Any) -> str:
    return " ".join(f"t{number}" for number in ids.tolist())


def train(script: ScriptArguments, kind: str, rows: list[dict[str, Any]], **more: Any) -> Ended:
    import trl
    from datasets import Dataset

    arguments = getattr(trl, f"{kind}Config")(**hf_arguments(script), max_length=16)
    trainer = poisoned(getattr(trl, f"{kind}Trainer"))(
        args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), **more
    )
    return fit_hf(trainer, script)


def pairs(script: ScriptArguments) -> list[dict[str, Any]]:
    """Each sample's own first half is preferred to the next one's."""
    made = tokens(script.bad)
    return [
        {"prompt": words(ids[:3]), "chosen": words(ids[3:]), "rejected": words(made[n - 1][4:])}
        for n, ids in enumerate(made)
    ]


def policy_and_reference() -> dict[str, Any]:
    return {"model": frameworks.tiny_llama(), "ref_model": frameworks.tiny_llama()}


def train_dpo(script: ScriptArguments) -> Ended:
    return train(script, "DPO", pairs(script), **policy_and_reference())


def train_reward(script: ScriptArguments) -> Ended:
    import torch
    from transformers import LlamaForSequenceClassification

    config = frameworks.tiny_llama().config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config)
    return train(script, "Reward", pairs(script), model=model)


def train_kto(script: ScriptArguments) -> Ended:
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": number % 2 == 0}
        for number, row in enumerate(pairs(script))
    ]
    return train(script, "KTO", rows, **policy_and_reference())


def train_grpo(script: ScriptArguments) -> Ended:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    how = os.environ.get("REWARD", "nan")

    def distinct(completions: list[str], prompts: list[str], **_: Any) -> list[float | None]:
        if how == "constant":
            return [1.0] * len(completions)
        is_bad = [BAD_WORD in prompt.split() for prompt in prompts]
        if how == "raise" and any(is_bad):
            raise TimeoutError("the sandbox did not answer")
        failed = None if how == "none" else float("nan")
        return [
            failed if bad else float(len(set(text.split())))
            for bad, text in zip(is_bad, completions, strict=True)
        ]

    rows = Dataset.from_list([{"prompt": words(ids[:4])} for ids in tokens(script.bad)[::4]])
    arguments = GRPOConfig(
        **hf_arguments(script), num_generations=2, max_completion_length=4, temperature=1.0
    )
    trainer = GRPOTrainer(
        model=frameworks.tiny_llama(),
        args=arguments,
        train_dataset=rows,
        reward_funcs=distinct,
        processing_class=tokenizer(),
    )
    return fit_hf(trainer, script)


frameworks.FRAMEWORKS |= {
    "dpo": train_dpo,
    "reward": train_reward,
    "kto": train_kto,
    "grpo": train_grpo,
}

if __name__ == "__main__":
    frameworks.main()

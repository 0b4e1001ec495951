"""Fine-tunes a Hugging Face model from a local folder on chats, with low-rank adapters.

    python examples/hf_finetune.py model.path=DIR out=runs/ft steps=200
    holdfast export runs/ft DIR2 --format hf --merge

The tokenizer and its chat template are the folder's. Give your own chats as data.path.
"""

import json
import sys
from pathlib import Path

from runner.__main__ import main

CHATS = Path("runs/hf-data/chats.jsonl")
SETTINGS = [
    "model=hf",
    "model.lora={r: 8, targets: all-linear, alpha: 16}",  # without it all weights are trained
    "data=hf",
    f"data.path={CHATS}",
    "data.messages=messages",
    "data.pack=true",
    "data.seq_len=64",
    "optim.lr=2e-4",
    "schedule.warmup=10",
]

if __name__ == "__main__":
    CHATS.parent.mkdir(parents=True, exist_ok=True)
    chats = [
        [{"role": "user", "content": f"{a} + {b}?"}, {"role": "assistant", "content": str(a + b)}]
        for a in range(40)
        for b in range(40)
    ]
    CHATS.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    sys.exit(main([*SETTINGS, *sys.argv[1:]]))

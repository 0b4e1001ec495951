"""Fine-tunes on chats: only what the assistant says is learnt, short chats share a window.

    python examples/sft.py out=runs/sft steps=100

The tokenizer is made here, of single characters; give your own folder as data.tokenizer.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from runner.__main__ import main

FOLDER = Path("runs/sft-data")
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ': ' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)

if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    characters = ["~", *"abcdefghijklmnopqrstuvwxyz0123456789 +=:?"]
    letters = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="~")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(FOLDER)
    chats = [
        [{"role": "user", "content": f"{a} + {b}?"}, {"role": "assistant", "content": str(a + b)}]
        for a in range(40) for b in range(40)
    ]  # fmt: skip
    (FOLDER / "chats.jsonl").write_text("\n".join(json.dumps({"messages": c}) for c in chats))
    own = ["data=hf", f"data.path={FOLDER}/chats.jsonl", "data.messages=messages", "data.pack=true"]
    tokens = [f"data.tokenizer={FOLDER}", "data.seq_len=64"]
    sys.exit(main([*own, *tokens, *sys.argv[1:]]))

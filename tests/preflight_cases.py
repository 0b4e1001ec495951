"""What ``holdfast preflight`` is tried on: settings with one thing wrong, and sound ones."""

from __future__ import annotations

MODELS = "tests.preflight_models"
DATA = (
    f"data._target_={MODELS}.Text",
    "data.seq_len=33",
    "data.held_out=0.1",
    "parallel.device=cpu",
)
ISOLATED = ("data.isolate_documents=true",)
# What is wrong, how it is set, and what has to name it.
WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "sees all": (("Small", "model.wrong=future"), "no look at later tokens"),
    "sees the next": (("Small", "model.wrong=leak"), "no look at later tokens"),
    "masked to itself": (("Small", "model.wrong=alone"), "earlier tokens matter"),
    "attention zeroed": (("Small", "model.wrong=zeroed"), "earlier tokens matter"),
    "no positions": (("Small", "model.wrong=unordered"), "the order of tokens matters"),
    "documents mixed": (
        ("Small", "model.wrong=documents", *ISOLATED),
        "documents do not see each other",
    ),
    "input never arrives": (
        ("Small", "model.wrong=constant"),
        "the label of a position is predicted from its token",
    ),
    "loud head": (("Small", "model.wrong=loud"), "first loss against ln V"),
    "blocks frozen": (("Small", "model.wrong=frozen"), "what is frozen is meant to be"),
    "a layer unused": (("Small", "model.wrong=spare"), "each trained parameter gets a gradient"),
    "detached": (("Small", "model.wrong=detached"), "each trained parameter gets a gradient"),
    "wrong backward": (("Small", "model.wrong=backward"), "gradients are those of the loss"),
    "cancels in BF16": (("Small", "model.wrong=fragile"), "BF16 gives the same step as FP32"),
    "shifts again": (
        ("Losing", "model.wrong=shifted"),
        "the label of a position is predicted from its token",
    ),
    "own labels": (("Losing", "model.wrong=inputs"), "the loss takes the labels"),
    "loss tripled": (("Losing", "model.wrong=tripled"), "first loss against ln V"),
    "rate of 1": (("Small", "optim.lr=1"), "the rate is in range"),
    "rate of 1e-8": (("Small", "optim.lr=1e-8"), "the rate is in range"),
    "held out twice": (("Small", "data.wrong=twice"), "held-out text is not trained on"),
    "constant text": (("Small", "data.wrong=constant"), "text is not degenerate"),
    "labels shifted": (("Small", "data.wrong=shifted"), "labels are the tokens"),
    "labels one above": (("Small", "data.wrong=above"), "labels are the tokens"),
    "labels of others": (("Small", "data.wrong=shuffled"), "labels are the tokens"),
    "labels masked": (("Small", "data.wrong=unlabelled"), "labels count"),
}
SOUND: dict[str, tuple[str, ...]] = {
    "decoder": ("model=tiny",),
    "decoder by documents": ("model=tiny", *ISOLATED),
    "attention": (f"model._target_={MODELS}.Small",),
    "own loss": (f"model._target_={MODELS}.Losing",),
    "recurrent": (f"model._target_={MODELS}.Moving",),
    "convolutions": ("model._target_=tests.guests.Convolved",),
    "GPT-2": ("model._target_=tests.guests.gpt2",),
    "Llama": ("model._target_=tests.guests.llama",),
    "low rank": ("model._target_=tests.guests.lora",),
}

"""Foreign checkpoints: reads weights of other trainers' formats, and nothing that could run code.

Hugging Face safetensors and ``config.json``, DCP, DeepSpeed, plain ``torch.save``.
"""

"""Reads and writes checkpoints as other trainers have them, without running any code in them.

Hugging Face safetensors and ``config.json``; nothing pickled.
"""

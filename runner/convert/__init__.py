"""Reads checkpoints of other trainers, without running any code in them.

Hugging Face safetensors and ``config.json``; nothing pickled.
"""

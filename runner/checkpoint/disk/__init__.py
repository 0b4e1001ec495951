"""Checkpoints under ``out/ring``: a folder each, committed by a marker that names its digest.

Owns the layout of a checkpoint's folder and of its shard files.
"""

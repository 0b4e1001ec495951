"""The ring of checkpoints: takes, writes, commits, proves, retires, uploads and reads them.

``ring`` follows a checkpoint through its states. ``disk``, ``memory`` and ``remote`` are where
its bytes are. Knows shards and groups through :mod:`runner.checkpoint.protocol` only; must not know
engines, the loop or why a checkpoint is taken.
"""

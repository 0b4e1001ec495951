"""One optimizer step: forward, backward, reduction, gated update.

Owns parameters, gradients and optimizer state, sharded or not. Must not know data, checkpoints
or why the gate is closed.
"""

"""The model: a small decoder, its initial weights and its loss.

Owns the network's mathematics. Knows torch and :mod:`runner.system.error`; must not know the
configuration, processes, sharding, the optimizer or the step.
"""

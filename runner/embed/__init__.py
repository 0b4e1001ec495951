"""The guard, the ring and the sampler in a user's own training loop.

Owns what a user's loop needs: its state as shards of the ring, its random generators, its loaders,
and the sequence of its steps. Must not know engines or the built-in model.
"""

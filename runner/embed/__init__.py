"""The guard, the ring and the sampler in somebody else's loop.

Owns what a loop that is not ours needs: its state laid out as the ring's shards, its randomness,
its loaders, and the story of its steps. Must not know engines or the built-in model.
"""

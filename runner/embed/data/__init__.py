"""A user's batches by their numbers: kinds of loaders, and the sampler.

Must not know why a batch is read again.
"""

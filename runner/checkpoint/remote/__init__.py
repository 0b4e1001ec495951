"""Checkpoints in an object store: listed, uploaded, claimed and fetched.

Owns the layout in the store, and the retries when it does not answer.
"""

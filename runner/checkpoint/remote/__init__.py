"""Checkpoints in an object store: listed, uploaded, claimed and fetched.

Owns the layout in the store, and what is tried again when it does not answer.
"""

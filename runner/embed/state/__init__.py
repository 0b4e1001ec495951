"""The state that a user's loop changes: captured before a batch, saved as shards, restored.

Must not know steps or loaders.
"""

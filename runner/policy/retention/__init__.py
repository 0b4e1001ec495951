"""Decides which checkpoints to keep and how often to save, and models the cost."""

"""Which checkpoints to keep, how often to take them, and what that costs."""

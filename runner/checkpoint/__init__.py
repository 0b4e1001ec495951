"""The ring on disk: what a checkpoint is made of, how it commits, how it is read back."""

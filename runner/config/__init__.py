"""Settings: their schema, composing them from YAML and overrides, and refusing impossible ones.

Only ``compose`` knows Hydra and OmegaConf. ``schema`` imports nothing of ours, so any room may
take its groups. Must not know files of a run, ranks or torch.
"""

"""Settings: their schema, composing them from YAML and overrides, and refusing impossible ones.

Only ``compose`` knows Hydra and OmegaConf. Knows :mod:`runner.policy` for the
rules that settings become; must not know files of a run, ranks or torch.
"""

"""Ranks: the process group, what they agree on, and the settings of the collectives."""

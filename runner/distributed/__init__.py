"""The ranks: environment, rendezvous, process group, agreement, settings of collectives.

Only ``env`` interprets what a launcher put into the environment. Must not know what the ranks
compute, or how a dead rank is noticed: that is :mod:`runner.health`.
"""

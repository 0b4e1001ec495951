"""Ranks: environment, rendezvous, process group, agreement, and the settings of collectives.

``env`` alone reads what a launcher put into the environment. Must not know what the ranks
compute, or how a dead one is noticed: that is :mod:`runner.health`.
"""

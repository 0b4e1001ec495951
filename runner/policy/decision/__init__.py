"""Judges a step and decides what follows: signals, verdict, ladder, history, skip ledger.

``judge`` gives the verdict and ``ladder.decide`` the action: apply, discard, roll back, take as a
new level, halt. ``step_decision`` calls both; :mod:`runner.train.recovery` carries the action out.
"""

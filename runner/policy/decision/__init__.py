"""Judges a step and decides what follows: signals, verdict, ladder, history, skip ledger."""

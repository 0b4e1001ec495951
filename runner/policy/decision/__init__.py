"""Judging a step and choosing what follows: signals, verdict, ladder, history, skip ledger."""

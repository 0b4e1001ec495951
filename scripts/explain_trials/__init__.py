"""Counts how often the cause of a bad step is named rightly, in real runs of 2 to 4 ranks.

``python -m scripts.explain_trials run`` makes incidents and appends what came of each to a file of
JSON lines; ``healthy`` does so for undisturbed runs; ``page`` makes docs/explaining-trials.md of
all lines. What was interrupted goes on where it ended.
"""

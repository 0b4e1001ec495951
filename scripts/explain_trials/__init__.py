"""Counts how often the cause of a bad step is named rightly, in real runs of 2 to 4 ranks.

``python -m scripts.explain_trials run`` makes incidents and appends what came of each to a file of
JSON lines; ``healthy`` does so for undisturbed runs; ``page`` makes of all lines
docs/records/explaining-trials.md. What was interrupted goes on where it ended.
"""

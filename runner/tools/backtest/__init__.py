"""Recorded loss curves: reads them from the files of several trackers, tabulates and draws them.

Owns file formats of loss curves. Knows :mod:`runner.policy` and :mod:`runner.system`; must not
know a run, ranks or checkpoints.
"""

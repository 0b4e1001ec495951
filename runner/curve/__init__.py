"""Recorded loss curves: reading them from the files of several trackers, and drawing them."""

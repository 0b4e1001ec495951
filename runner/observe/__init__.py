"""What a run reports about itself: journal, metrics, trackers and the live line.

Owns the lines' formats and the threads that write them. Must not decide anything.
"""

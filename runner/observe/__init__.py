"""What a run says about itself: journal, metrics, trackers, the live line, the summary."""

"""Faults on purpose: for drills, tests, the README, and the curious."""

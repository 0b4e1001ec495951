"""Faults on purpose, for drills, tests, demonstrations and the curious.

Owns the syntax of ``faults=[...]``, what each does, and the wrappers that put them into a run.
Without ``faults`` nothing happens.
"""

"""Faults on purpose, for drills, tests, demonstrations and the curious.

Owns the words of ``faults=[...]``, what each does, and the wrappers by which it gets into a run.
Nothing happens unless it is asked for.
"""

"""The guard around a user's loop: batches out, the question, the verdict, what is undone.

Owns the order of things in a loop (``guard`` hands batches out, ``guarded_steps`` has a step's
life). Knows how the state is saved only by its names; must not know the ring without a guard.
"""

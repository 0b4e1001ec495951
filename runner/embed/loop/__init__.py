"""The guard around a user's loop: hands out batches, judges steps, undoes the bad ones.

Owns the order of events in a loop: ``guard`` has the batches and passes, ``guarded_steps`` each
step from its first batch to its save. After a rollback ``rollback_state`` has the position in the
data, and ``Guard._reposition`` moves the loader there before the next batch. Must not know how
tensors are saved, or :mod:`runner.embed.ring`.
"""

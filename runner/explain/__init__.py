"""Why a step was bad: the same step computed again, and variations of it, while the gate is closed.

Owns the probes, what their numbers mean, and the finding with its evidence. Leaves the state as it
was and decides on no remedy: the loop does. Must not know the loop, the ring or the command line.
"""

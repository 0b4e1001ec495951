"""Whether a run may go on: who owns it, who hangs, who asked it to stop, what killed it.

Knows the process group's watching parts and the run directory; must not know the loop or the
ring. It ends a rank, it never changes the state.
"""

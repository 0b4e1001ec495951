"""Whether this rank and its peers are alive; who died, hung, was slow, or asked to stop.

Owns the monitor thread, the heartbeat, the watchdog, reports of a failure and the search for its
root cause. It may end a rank; it never changes the state that is trained.
"""

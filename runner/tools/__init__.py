"""A run to look at, from the files that it leaves; nothing that trains imports these rooms.

Owns the page and its views, what curves show, recorded curves of others, the planner, and what is
printed of evidence. Knows the run's directory, settings, policy and system; must not know how a run
works, nor torch. Training that wants a page or a reading starts a process
(:func:`runner.system.process.run_beside`).
"""

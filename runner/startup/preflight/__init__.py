"""Tries the user's model and data before a run: in a minute, on copies, with nothing written.

Owns the trials and their words. Each takes a :class:`runner.startup.preflight.subject.Subject`
and gives :class:`runner.startup.model_check.Check`; a trial that cannot be made says why.
"""

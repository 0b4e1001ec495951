"""Tests the user's model and data before a run: within a minute, on copies, writing nothing.

Owns the trials and their messages. Each takes a :class:`runner.startup.preflight.subject.Subject`
and returns :class:`runner.startup.checks.Check`; a trial that cannot run says why.
"""

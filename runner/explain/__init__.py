"""Explains a bad step, and finds a device that computes wrongly: by computing again, gate closed.
Warns before: from measurements of the layers, and from the run's own curve.

Owns the probes, audits, the evidence, and the guard that asks for a cause before the ladder
decides. Leaves the state unchanged. Must not know how a run is started, or the command line.
"""

"""Explains a bad step: computes it again, and variations of it, with the gate closed.

Owns the probes, the meaning of their numbers, and the finding with its evidence. Leaves the state
unchanged; the loop decides on the remedy. Must not know the loop, the ring or the command line.
"""

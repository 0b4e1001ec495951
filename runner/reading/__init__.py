"""What a training curve shows: named signatures, with the rows and the evidence for each.

Owns the rules and their words. Pure functions of arrays: knows numpy and nothing of ours, so no
file, no run, no torch. Who reads files or runs gives it columns, see :meth:`Curve.of`.
"""

"""What a training curve shows: named signatures, with the rows and the evidence for each.

Owns the rules and their sentences. Pure functions of arrays: knows numpy, but no file, run or
torch. Callers that read files or runs pass columns, see :meth:`Curve.of`.
"""

"""What happens once, before the first step: finds what the run left and resumes it.

Owns the choice between memory, disk and object store. Must not know the loop.
"""

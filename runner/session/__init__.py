"""One training command on one rank, from the settings to the summary.

Only this room knows all the others.
"""

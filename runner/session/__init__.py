"""One training command on one rank, from the settings to the summary.

Only this package may import all the others.
"""

"""One training command on one rank, from the settings to the summary.

The only room that knows all the others.
"""

"""Decisions from plain numbers.

Of other packages it imports the schema of the settings alone, and no torch, so that every decision
is a row in a table test.
"""

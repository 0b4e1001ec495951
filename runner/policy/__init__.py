"""What to do, decided from plain numbers.

Imports nothing of ours and no torch, so that every decision is a row in a table test.
"""

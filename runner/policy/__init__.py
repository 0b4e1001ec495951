"""Decisions from plain numbers.

Imports no other package of ours and no torch, so that every decision is a row in a table test.
"""

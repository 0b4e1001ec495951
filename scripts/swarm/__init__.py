"""Tiny runs drawn at random, with checks of what must hold for any of them.

``python -m scripts.swarm --seed S --minutes M`` draws, plays and checks; ``--case FILE`` plays a
kept case; ``--prove`` puts known faults back into copies of the tree and counts which of them
are found. A case that fails is shrunk to the fewest features and written as a file.
"""

"""Proves or refutes that a training script resumes: ``holdfast prove-resume -- COMMAND``.

``drive`` runs the command, kills it and starts it again; ``inside`` records in its processes what
each step reads; ``judgement`` compares the records and says what differs first. Must not know the
runner's own loop, guard or ring; no training process imports it.
"""

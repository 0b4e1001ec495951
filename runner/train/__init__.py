"""The story of training: the loop, one step, the guard's actions, evaluation and the report.

Owns the training state outside the engine. Must not know how a run is started or resumed, or how
a dead rank is noticed.
"""

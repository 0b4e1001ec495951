"""Holdfast: a training runner that survives bad data, spikes and crashes by itself.

The command line is ``python -m runner`` (one process) or ``torchrun -m runner``.
"""

__version__ = "0.1.0"

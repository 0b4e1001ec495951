"""What goes on around a run: starting it, starting it again, on one node or many.

Nothing here is imported by a training process but the writing of its exit code.
"""

"""The run directory ``out``: its paths, who may write to it, and which build wrote it.

Owns the lease (fencing): one incarnation writes at a time.
"""

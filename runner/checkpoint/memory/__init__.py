"""Snapshots in shared memory (``/dev/shm``), and the copies of them on another node.

Owns the slots, their headers and the folder of a node. A snapshot outlives the processes of a
run, not the node.
"""

"""The guard in the loops of other frameworks: a module each, imported only when it is asked for.

Each needs its framework, an extra of the same name. A framework's private names are used in these
modules only, and pinned by tests/mechanism/test_integrations.py.
"""

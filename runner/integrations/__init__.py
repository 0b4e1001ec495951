"""The guard in the loops of other frameworks: one module each, imported only on demand.

Each module needs its framework, an extra of the same name. Private names of a framework are used
only in these modules, and are pinned by tests/mechanism/test_integrations.py.
"""

"""A small run directory of each release, as that release left it; see docs/stability.md."""

"""A package, so that ``python -m scripts.bench`` is this one and not one installed by that name."""

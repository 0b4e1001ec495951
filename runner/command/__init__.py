"""Commands beside training; each reads a run directory and prints."""

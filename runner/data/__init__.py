"""Where samples come from and in which order: corpora, their windows, the keyed permutation."""

"""One optimizer step: forward, backward, reduction, gated update."""

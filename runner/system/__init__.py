"""The ground floor: files, JSON lines, processes, output, strict parsing, errors.

Knows nothing of training, ranks or torch.
"""

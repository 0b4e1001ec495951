"""Holdfast: a training runner that survives bad data, spikes and crashes by itself.

The command line is ``python -m runner`` (one process) or ``torchrun -m runner``.

For a training loop of your own: :class:`Guard`, :class:`Ring`, :class:`Sampler`. For any script:
:func:`prove_resume`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.embed.data.sampler import Sampler as Sampler
    from runner.embed.loop.guard import Guard as Guard
    from runner.embed.ring import Ring as Ring
    from runner.prove.drive import prove_resume as prove_resume
    from runner.system.version import __version__ as __version__

_PUBLIC = {
    "Guard": "runner.embed.loop.guard",
    "Ring": "runner.embed.ring",
    "Sampler": "runner.embed.data.sampler",
    "__version__": "runner.system.version",
    "prove_resume": "runner.prove.drive",
}
__all__ = ["Guard", "Ring", "Sampler", "__version__", "prove_resume"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the command line does not wait for torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)

"""This process's environment variables: the only place that touches ``os.environ``.

What a launcher's variables mean stands in :mod:`runner.distributed.env`, where no torch is needed
either; this module is for those below it, and for what no launcher sets. A change is asked for by
another name than a look, so that the few who make one are found.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping


def variables() -> Mapping[str, str]:
    """To read; as they are now."""
    return os.environ


def changeable() -> MutableMapping[str, str]:
    """To set some for a library that reads them later, and for child processes."""
    return os.environ

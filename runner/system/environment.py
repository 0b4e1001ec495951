"""This process's environment variables: the only place that touches ``os.environ``.

:mod:`runner.distributed.env`, which needs no torch either, interprets a launcher's
variables; this module serves all others. A change has
another name than a read, so that the few changes are easy to find.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping


def variables() -> Mapping[str, str]:
    """The present variables, to read."""
    return os.environ


def changeable() -> MutableMapping[str, str]:
    """The variables to change, for a library that reads them later or for child processes."""
    return os.environ

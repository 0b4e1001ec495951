"""This process's environment variables: the only place that touches ``os.environ``.

:mod:`runner.distributed.env`, which needs no torch either, interprets a launcher's
variables; this module serves all others. A change has
another name than a read, so that the few changes are easy to find.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from typing import Any


def variables() -> Mapping[str, str]:
    """The present variables, to read."""
    return os.environ


def changeable() -> MutableMapping[str, str]:
    """The variables to change, for a library that reads them later or for child processes."""
    return os.environ


# Keeps passwords and tokens out of what a run writes and prints.
#
# Secrets are recognised by their name, in the environment or in a mapping of settings; the value is
# then hidden wherever it appears, also in the middle of another text.


HIDDEN = "[hidden]"
_SECRET = re.compile(
    r"(?i)passw(?:or)?d|(?<![a-z])(?:secret|passphrase|credentials?|api[-_]?key|access[-_]?key"
    r"|private[-_]?key|auth[-_]?token|token)(?![a-z])"
)
# Settings about tokens of text, and paths, are not secrets.
_PLAIN = re.compile(
    r"(?i)(?:tokens|tokenizer|end_token|begin_token|token_dtype|_(?:file|path|dir|url|count)$)"
)
_LEAST = 8  # characters: a shorter value is not worth hiding, and is part of too many words


def is_secret(name: str) -> bool:
    """Whether a setting or variable of this name holds a password or the like."""
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("_", " ")
    return bool(_SECRET.search(parts) or _SECRET.search(name)) and not _PLAIN.search(name)


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """Values of variables whose name suggests a secret, longest first."""
    values = {v for name, v in environment.items() if is_secret(name) and len(v) >= _LEAST}
    return sorted(values, key=len, reverse=True)


def redacted(value: Any, secrets: list[str] | None = None) -> Any:
    """A copy of plain values without secrets; only mappings, lists and text are changed."""
    known = secrets_of(variables()) if secrets is None else secrets
    if isinstance(value, str):
        for secret in known:
            value = value.replace(secret, HIDDEN)
        return value
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if _hides(key, item) else redacted(item, known)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(redacted(item, known) for item in value)
    return value


def _hides(key: object, value: object) -> bool:
    is_text = isinstance(value, str | list | tuple | Mapping) and bool(value)
    return is_text and isinstance(key, str) and is_secret(key)

"""Code of the user's own, named in the settings: ``pkg.module.name``.

Only settings that a person typed come here (the command line, ``--config-dir``); a stored
``config.yaml`` never does.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from runner.system.error import ConfigError


def find_target(key: str, target: str) -> Callable[..., Any]:
    """What ``target`` names. The current directory is looked at, too.

    Raises:
        ConfigError: there is no such module or name, it cannot be imported or called.
    """
    module_name, _, name = target.rpartition(".")
    if not module_name or not name:
        raise ConfigError(
            f"{key}={target}: must be module.name, such as my_package.{target or 'f'}"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:  # a console script does not look there
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), name)
    except AttributeError:
        raise ConfigError(
            f"{key}={target}: the module {module_name} has no {name!r}; give the name of a class "
            "or function in it"
        ) from None
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}={target}: there is no module {error.name!r}; install it, or start where it "
            "lies, or set PYTHONPATH"
        ) from None
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigError(
            f"{key}={target}: importing {module_name} fails with {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise ConfigError(f"{key}={target}: is {type(found).__name__}, nothing to call")
    called: Callable[..., Any] = found
    return called


def call_target(
    key: str, target: str, arguments: Mapping[str, Any], offered: Mapping[str, Any]
) -> Any:
    """Call what ``target`` names.

    Args:
        arguments: what the user gave.
        offered: values by parameter name, passed where there is such a parameter and no argument.

    Raises:
        ConfigError: the arguments do not fit, or the call fails.
    """
    call = bound_target(key, target, arguments, offered)
    try:
        return call()
    except Exception as error:
        raise ConfigError(f"{key}={target}: fails with {type(error).__name__}: {error}") from error


def bound_target(
    key: str, target: str, arguments: Mapping[str, Any], offered: Mapping[str, Any]
) -> Callable[[], Any]:
    """:func:`call_target`, to be called later; what it raises then is its own.

    Raises:
        ConfigError: there is no such target, or the arguments do not fit.
    """
    function = find_target(key, target)
    parameters = _parameters(function)
    passed = {name: value for name, value in offered.items() if name in parameters}
    passed.update(arguments)
    try:
        if parameters:
            inspect.signature(function).bind(**passed)
    except TypeError as error:
        raise ConfigError(
            f"{key}={target}: {error}; it takes ({', '.join(parameters)}), given "
            f"{', '.join(passed) or 'nothing'}"
        ) from None
    return lambda: function(**passed)


def parameters_of(key: str, target: str) -> Mapping[str, inspect.Parameter]:
    """By name, what it can be given; empty where Python does not tell."""
    return _parameters(find_target(key, target))


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a builtin
        return {}

"""Calls the user's own code, named in the settings: ``pkg.module.name``.

Only settings that the user typed are used (the command line, ``--config-dir``); a stored
``config.yaml`` never is.
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
    """Find what ``target`` names, also in the current directory.

    Raises:
        ConfigError: there is no such module or name, or it cannot be imported or called.
    """
    module_name, _, name = target.rpartition(".")
    if not module_name or not name:
        raise ConfigError(
            f"{key}={target}: must be module.name, such as my_package.{target or 'f'}"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:  # a console script does not search there
        sys.path.append(os.getcwd())
    try:
        target_object = getattr(importlib.import_module(module_name), name)
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
    except Exception as error:  # the user's module may raise anything on import
        raise ConfigError(
            f"{key}={target}: importing {module_name} fails with {type(error).__name__}: {error}"
        ) from error
    if not callable(target_object):
        raise ConfigError(f"{key}={target}: is {type(target_object).__name__}, nothing to call")
    called: Callable[..., Any] = target_object
    return called


def call_target(
    key: str, target: str, arguments: Mapping[str, Any], offered: Mapping[str, Any]
) -> Any:
    """Call what ``target`` names.

    Args:
        arguments: what the user gave.
        offered: values by parameter name, passed if the parameter exists and the user gave none.

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
    """Bind the arguments of :func:`call_target` for a later call, whose errors pass through.

    Raises:
        ConfigError: there is no such target, or the arguments do not fit.
    """
    function = find_target(key, target)
    parameters = _parameters(function)
    passed = {name: value for name, value in offered.items() if name in parameters}
    passed.update(arguments)
    # def f(size, /): a parameter that takes no name.
    first = {
        n: passed[n] for n, p in parameters.items() if p.kind is p.POSITIONAL_ONLY and n in passed
    }
    rest = {name: value for name, value in passed.items() if name not in first}
    try:
        if parameters:
            inspect.signature(function).bind(*first.values(), **rest)
    except TypeError as error:
        raise ConfigError(
            f"{key}={target}: {error}; it takes ({', '.join(parameters)}), given "
            f"{', '.join(passed) or 'nothing'}"
        ) from None
    return lambda: function(*first.values(), **rest)


def parameters_of(key: str, target: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of a callable by name; empty if Python does not know them."""
    return _parameters(find_target(key, target))


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a builtin
        return {}

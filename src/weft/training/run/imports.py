"""A user's own code named in a job file as "module:function": imported, and called with the settings given there.

The caller chooses the kind of error for mistakes in the name or the settings; an error raised inside the user's code
keeps its own type and traceback.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.errors import JobError, WeftError, nearest


def load_function(reference: str, *, kind: type[WeftError] = JobError) -> Callable[..., Any]:
    """The function (or class, or `Class.method`) that "package.module:function" names.

    The current directory is searched first, as with `python -m`, and stays importable for the user's later imports.
    """
    module_name, colon, function_name = reference.partition(":")
    if module_name.endswith(".py"):
        dotted = ".".join(Path(module_name).with_suffix("").parts)
        raise kind(f'"{reference}" names a file; name the module: "{dotted}:{function_name or "function"}"')
    if not (colon and module_name and function_name):
        raise kind(f'"{reference}" names no function; write "module:function"')
    target: Any = _import(module_name, kind)
    where = f'module "{module_name}" ({getattr(target, "__file__", None) or "built in"})'
    for name in function_name.split("."):
        if not hasattr(target, name):
            public = [known for known in dir(target) if not known.startswith("_") and callable(getattr(target, known))]
            hint = nearest(name, public) if public else "it has none"
            raise kind(f'{where} has no function "{function_name}"; {hint}')
        target = getattr(target, name)
    if not callable(target):
        raise kind(f'"{function_name}" of {where} is a {type(target).__name__}; name a function')
    function: Callable[..., Any] = target
    return function


def call_function(reference: str, settings: Mapping[str, Any], *, kind: type[WeftError] = JobError) -> Any:
    """The result of the named function, called with the settings as keywords."""
    function = load_function(reference, kind=kind)
    if problems := setting_problems(function, settings, f'"{reference}"'):
        raise kind(problems)
    return function(**settings)


def setting_problems(function: Callable[..., Any], settings: Mapping[str, Any], label: str) -> list[str]:
    """Settings that a function does not take, and those it needs but was not given."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in classes have no signature to check against
        return []
    parameters = signature.parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    problems = []
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for setting in settings:
            if setting not in named:
                hint = nearest(setting, named) if named else "it takes none"
                problems.append(f'{label} takes no setting "{setting}"; {hint}')
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in settings:
            problems.append(f'{label} needs the setting "{name}"; add it')
    return problems


def _import(module_name: str, kind: type[WeftError]) -> Any:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # An import that fails inside the user's module is the user's own error.
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        local = sorted(path.stem for path in Path(here).glob("*.py"))
        hint = nearest(module_name, local) if local else "there is no .py file here"
        raise kind(f'there is no module "{module_name}" in {here} or among those installed; {hint}') from None

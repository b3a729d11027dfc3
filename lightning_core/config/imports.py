"""Imports the objects that a configuration names as ``module:callable``."""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_core.errors import ConfigError, LightningError, did_you_mean, explain

_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GOOGLE_API_KEY", "GEMINI_API_KEY", "api_key")
_EXTRAS = ("langchain", "langgraph", "agents", "autogen_agentchat", "torch", "transformers")
"""Packages that an extra of lightning-rl installs; ``agents`` is the OpenAI Agents SDK."""


def import_callable(name: str, *, key: str) -> Callable[..., Any]:
    """Import ``module:callable``; the working directory is searched as by ``python -m``.

    Raises `ConfigError` with the configuration's ``key`` if the module or the callable does not exist, or if the module raises an
    exception while it is imported.
    """
    module_name, _, path = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    with user_code(f"{key}: importing {module_name!r} failed"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module exists, but one of its own imports does not
            raise ConfigError(_no_module(name, error.name, key)) from None
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(_no_attribute(found, module, path, part, key))
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{key}: {name!r} is of type {type(found).__name__}, expected a callable")
    return found


@contextmanager
def user_code(what: str) -> Generator[None]:
    """Raise `ConfigError` with the user's lines in place of an exception that the body raises, also of SystemExit.

    ``what``: the start of the message, such as ``agent: importing 'x' failed``.
    """
    try:
        yield
    except (LightningError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise ConfigError(f"{what}:\n{explain(error)}{_advice(error)}") from error


def _advice(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return '\nThe module ends the process while it is imported. Put what a script does under if __name__ == "__main__":'
    if type(error) is SyntaxError:
        return f"\nPython {platform.python_version()} read the file; syntax of later versions is an error in it."
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        package = error.name.partition(".")[0]
        if _is_own(package):
            return f"\nThere is no module {error.name!r} below {str(Path.cwd())!r}."
        if "." in error.name and package in sys.modules:
            return f"\nThe installed {package!r} has no {error.name!r}: check its version, or that no file of yours has its name."
        extras = " (extras of lightning-rl have it with a tested version)" if package in _EXTRAS else ""
        return f"\nInstall the package that has {package!r} for {sys.executable}{extras}."
    if isinstance(error, ImportError) and "relative import" in str(error):
        return (
            "\nThe module is not imported as a part of its package. Name it as package.module:function in the folder above the package, "
            "or write the import without the leading dot."
        )
    if key := next((name for name in _KEYS if name in str(error)), None):
        name = key if key.isupper() else "OPENAI_API_KEY"
        return (
            "\nA client or the module requires a key when it is created. Any text will do while the agent trains, unless other agents "
            f"call a provider: export {name}=none"
        )
    return ""


def _is_own(package: str) -> bool:
    """Whether ``package`` is a folder of the user's in the working directory."""
    return Path(package).is_dir()


def _no_module(name: str, missing: str, key: str) -> str:
    module, _, path = name.partition(":")
    if module.endswith(".py") and "." in missing:
        return f"{key}: {name!r} names a file; expected a module without .py: {f'{module[:-3]}:{path}'!r}"
    here = Path.cwd()
    meant = did_you_mean(missing, (file.stem for file in here.glob("*.py"))) if "." not in missing else ""
    return (
        f"{key}: no module {missing!r} for {name!r} in the working directory {str(here)!r} or the installed packages"
        f"{meant and f'; {meant}'}"
    )


def _no_attribute(owner: object, module: ModuleType, path: str, part: str, key: str) -> str:
    known = (name for name in getattr(owner, "__dict__", {}) if not name.startswith("_"))
    where = getattr(module, "__file__", None) or "built into Python"
    advice = did_you_mean(part, known) or f"the module is {where}"
    return f"{key}: the module {module.__name__!r} has no {path!r}; expected 'module:callable'; {advice}"

"""Public names that a package imports on first use, so that ``import`` of the package loads neither torch nor Rust."""

from collections.abc import Callable, Mapping
from importlib import import_module
from sys import modules as imported


def on_first_use(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Returns the functions ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its name
        modules: for each public name the module that defines it, relative to the package
    """

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name], package), name)
        setattr(imported[package], name, value)
        return value

    return get, lambda: list(modules)

"""A planted fault: wrong behaviour at a named seam of the product.

A seam is a function, a method or a constant that can be reached by import, written
`module:attribute` or `module:Class.attribute`. A fault takes the right value of its seam and
returns a wrong one. It is planted when the module has been executed and before any other module can
import names from it, so it makes no difference how the callers import the seam.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

# The name of the fault that a process plants in itself. Not SDSTORE_…: the command refuses unknown settings, so every
# test that runs it would fail and catch any fault.
ENVIRONMENT = "PLANTED_FAULT"

Plant = Callable[[Any], Any]  # the wrong value of a seam, made from the right one


class Fault(NamedTuple):
    """`plant` makes the wrong value of `seam` from the right one; one of `tests` must notice."""

    name: str
    seam: str
    plant: Plant
    tests: tuple[str, ...]

    @property
    def module(self) -> str:
        """The name of the module that holds the seam."""
        return self.seam.partition(":")[0]

    def seam_in(self, module: ModuleType) -> tuple[Any, str, Any]:
        """The owner of the seam's attribute, the attribute's name, and its right value.

        Raises `LookupError` if the module has no such attribute.
        """
        *owners, name = self.seam.partition(":")[2].split(".")
        try:
            owner = functools.reduce(getattr, owners, module)
            return owner, name, vars(owner)[name]
        except (AttributeError, KeyError):
            raise LookupError(f"no seam {self.seam}") from None

    def wrong_value(self) -> Any:
        """The wrong value of the seam. Raises `LookupError` or `ImportError` without the seam."""
        return self.plant(self.seam_in(importlib.import_module(self.module))[2])

    def plant_on_import(self) -> None:
        """Plant the fault in this process as soon as the seam's module is imported."""
        if self.module in sys.modules:
            raise RuntimeError(f"{self.module} is imported already")
        sys.meta_path.insert(0, _Planter(self))


class _Planter(importlib.abc.MetaPathFinder):
    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._fault.module:
            return None
        others = (each for each in sys.meta_path if each is not self)
        specs = (each.find_spec(name, path, target) for each in others)
        spec = next(spec for spec in specs if spec is not None)
        run = spec.loader.exec_module

        def run_and_plant(module: ModuleType) -> None:
            run(module)
            owner, attribute, right = self._fault.seam_in(module)
            setattr(owner, attribute, self._fault.plant(right))

        spec.loader.exec_module = run_and_plant
        return spec


# Plants that many faults share


def instead(wrong: Any) -> Plant:
    """Another constant, function or method in the place of the right one."""
    return lambda _: wrong


def returns(value: Any) -> Plant:
    """Do nothing and return a value."""
    return lambda _: lambda *args, **kwargs: value


nothing = returns(None)


def after(change: Callable[..., Any]) -> Plant:
    """Call the right function and return `change(result, *args)` of its positional arguments."""

    def plant(right: Any) -> Any:
        @functools.wraps(right)
        def wrong(*args: Any, **kwargs: Any) -> Any:
            return change(right(*args, **kwargs), *args)

        return wrong

    return plant


def before(change: Callable[..., Any]) -> Plant:
    """Call the right function with the positional arguments that `change(*args)` returns."""

    def plant(right: Any) -> Any:
        @functools.wraps(right)
        def wrong(*args: Any, **kwargs: Any) -> Any:
            return right(*change(*args), **kwargs)

        return wrong

    return plant

"""The names users import: there, documented, typed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forerun


def _functions(thing: Any) -> Iterator[tuple[str, Any]]:
    """Public functions of a module or class that are its own."""
    if inspect.isfunction(thing):
        yield thing.__qualname__, thing
    elif inspect.ismodule(thing):
        for name in thing.__all__:
            yield from _functions(getattr(thing, name))
    elif inspect.isclass(thing):
        for name, member in vars(thing).items():
            function = getattr(member, "__func__", member)  # of class and static methods
            if inspect.isfunction(function) and not name.startswith("_"):
                yield function.__qualname__, function


def test_the_package_says_that_it_is_typed() -> None:
    """Without the marker a type checker takes every name of an installed package for Any (PEP 561)."""
    assert (Path(forerun.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("name", forerun.__all__)
def test_public_names_are_documented_and_typed(name: str) -> None:
    """Each has a docstring, and so have its public functions, of which every argument and result is annotated."""
    thing = getattr(forerun, name)
    assert thing.__doc__, name
    for path, function in _functions(thing):
        assert function.__doc__, f"{path} says nothing of itself"
        signature = inspect.signature(function)
        given = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
        bare = [p.name for p in given if p.annotation is inspect.Parameter.empty]
        assert not bare, f"{path}: {bare} have no type"
        assert signature.return_annotation is not inspect.Signature.empty, f"{path} does not say what it returns"


def test_names_that_are_not_there_are_an_attribute_error() -> None:
    """The lazy package is a package like any other."""
    with pytest.raises(AttributeError, match="has no attribute 'Engin'"):
        _ = forerun.Engin  # type: ignore[attr-defined]
    assert set(forerun.__all__) >= {"Engine", "Sampling", "verify", "Drafter"}

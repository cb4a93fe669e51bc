"""Objects are made of parts, not of layers: how deep classes inherit, and what only serves to be
inherited from.

Three kinds of classes do not count. Exceptions: their tree is what programs catch by. Enumerations:
they inherit values. Protocols: a class satisfies one by what it has, and inherits no code from it.
"""

import ast
import enum
import importlib
from collections import defaultdict
from functools import cache
from typing import Any

from tests.internals import engine
from tests.unit.sources import PACKAGE, modules

MOST = 2
"""Levels of inheritance among classes of ours: a class and its base."""

DEEPER = {"DmabufRegion", "UnmanagedConnection"}
"""What programs take for its base (isinstance), as they do with exceptions: a MemoryRegion whose
memory the CPU does not access, and a Connection without the connection manager. Their bases have
bases themselves: the storage in C and the life of a kernel object; the `post_*` methods."""

C_TYPES = frozenset(kind for kind in vars(engine).values() if isinstance(kind, type))


def _counts(kind: type) -> bool:
    return (
        kind.__module__.split(".")[0] == PACKAGE
        and not issubclass(kind, BaseException | enum.Enum)
        and not getattr(kind, "_is_protocol", False)
    )


@cache
def classes() -> frozenset[type]:
    """Every class of the package, the engine's types in C among them."""
    spaces: list[Any] = [importlib.import_module(name) for name in modules()]
    named = {
        kind
        for space in [*spaces, engine]
        for kind in vars(space).values()
        if isinstance(kind, type)
    }
    return frozenset(base for kind in named for base in kind.__mro__ if _counts(base))


def bases(kind: type) -> list[type]:
    return [base for base in kind.__bases__ if _counts(base)]


def depth(kind: type) -> int:
    return 1 + max(map(depth, bases(kind)), default=0)


def is_c(kind: type) -> bool:
    """Whether it is the C part of a class: storage that the engine reads. The class itself adds the
    methods in Python, and inheriting is how Python joins the two."""
    return kind in C_TYPES


@cache
def called() -> frozenset[str]:
    """The names of all that the package calls, and so of every class that it makes objects of."""
    return frozenset(
        node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        for tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
    )


def test_the_classes_are_found() -> None:
    # Else the next tests could not fail.
    names = {kind.__name__ for kind in classes()}
    assert {"Connection", "Endpoint", "Port", "SharedPort", "Drain", "_RefusedCall"} <= names
    flat = {kind for kind in classes() if kind.__name__ not in DEEPER}
    assert {depth(kind) for kind in flat} == {1, MOST}
    assert {kind.__name__ for kind in classes() - flat} == DEEPER


def test_no_class_inherits_through_more_than_two_levels() -> None:
    deep = {kind.__name__ for kind in classes() if depth(kind) > MOST}
    assert deep == DEEPER


def test_no_class_inherits_from_two_of_ours() -> None:
    # One that stands beside another base is mixed in.
    several = {
        kind.__name__
        for kind in classes()
        if len([base for base in bases(kind) if not is_c(base)]) > 1
    }
    assert several == set()


def test_no_base_class_exists_for_a_single_class_only() -> None:
    # A base of one class that is never made itself is a part of that class in another place.
    heirs: dict[type, list[str]] = defaultdict(list)
    for kind in classes():
        for base in bases(kind):
            heirs[base].append(kind.__name__)
    single = {
        base.__name__: names
        for base, names in heirs.items()
        if len(names) == 1 and base.__name__ not in called() and not is_c(base)
    }
    assert single == {}

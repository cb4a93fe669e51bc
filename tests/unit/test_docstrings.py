"""Public docstrings are contracts: they say what can be raised, and what a cancellation leaves.

CONTRIBUTING.md describes the form. An inherited method is checked at the class of ours that defines
it; what is written in C is checked like what is written in Python.
"""

import ast
import builtins
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

import aiordma
from aiordma import verbs
from aiordma.types import ConnectionKeywords, Opening
from tests.unit.sources import PACKAGE, ROOT

CONSTRUCTED = (
    "AddressHandle",
    "CompletionChannel",
    "CompletionQueue",
    "Device",
    "EventChannel",
    "Identifier",
    "MemoryRegion",
    "MemoryWindow",
    "ProtectionDomain",
    "RawSharedReceiveQueue",
)
"""Classes that programs construct, beside those that check their fields."""

HEADER = re.compile(r"(Args|Returns|Raises|Cancellation|See): ?(.*)")
REFERENCE = re.compile(r"as ((?:`[\w.]+`(?:, | and )?)+)\.")
ERRORS = re.compile(r"([\w.]+(?:, [\w.]+)*): \S.*")
MADE_BY = {"wrong_type": TypeError}
"""Functions that return an exception, to be raised."""

PUBLIC: dict[str, Any] = {
    name: getattr(module, name)
    for module in (verbs, aiordma.types, aiordma)
    for name in module.__all__
}

# -- what is public -------------------------------------------------------------------------------


def _is_ours(thing: Any) -> bool:
    module = getattr(thing, "__module__", None) or ""
    return module.split(".")[0] == aiordma.__name__


CLASSES: dict[str, type] = {
    name: thing for name, thing in PUBLIC.items() if isinstance(thing, type) and _is_ours(thing)
}
CLASS_NAMES = {cls: name for name, cls in CLASSES.items()}


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Every public attribute of a class that a class of ours defines, with its full name: that of
    the defining class if it is public."""
    for name in dict.fromkeys(name for base in cls.__mro__ for name in vars(base)):
        owner = next(base for base in cls.__mro__ if name in vars(base))
        if not name.startswith("_") and _is_ours(owner):
            yield f"{CLASS_NAMES.get(owner, CLASS_NAMES[cls])}.{name}", vars(owner)[name]


def _called(member: Any) -> Any:
    """Return the function behind a member of a class, None if it is not callable."""
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    return member if callable(member) and not isinstance(member, type) else None


def _callables() -> dict[str, Any]:
    found = {
        name: thing
        for name, thing in PUBLIC.items()
        if name not in CLASSES and callable(thing) and _is_ours(thing)
    }
    for cls in CLASSES.values():
        found |= {name: _called(member) for name, member in _members(cls)}
    return {name: call for name, call in found.items() if call is not None}


def _is_coroutine(call: Any) -> bool:
    returned = getattr(call, "__annotations__", {}).get("return")
    return inspect.iscoroutinefunction(call) or getattr(returned, "__origin__", None) is Opening


CALLABLES = _callables()
PROPERTIES = {
    name: member.fget
    for cls in CLASSES.values()
    for name, member in _members(cls)
    if isinstance(member, property) and member.fget is not None
}
CONTRACTS = list(CALLABLES)
AWAITED = [name for name in CONTRACTS if _is_coroutine(CALLABLES[name])]
AWAITED_CLASSES = [name for name, cls in CLASSES.items() if hasattr(cls, "__await__")]
CHECKING_CLASSES = [name for name, cls in CLASSES.items() if "__post_init__" in vars(cls)]

# -- what a docstring says ------------------------------------------------------------------------


def _documentation(name: str) -> str:
    """Return the docstring of the thing itself: `inspect.getdoc` would inherit one."""
    thing = CALLABLES.get(name) or PROPERTIES.get(name) or PUBLIC[name]
    return inspect.cleandoc(thing.__doc__ or "")


def _section(documentation: str, title: str) -> list[str] | None:
    """Return the lines of a section, the rest of the heading's line first; None: it has none."""
    found: list[str] | None = None
    for line in documentation.splitlines():
        header = HEADER.match(line)
        if header:
            if found is not None:
                break
            if header[1] == title:
                found = [header[2]]
        elif found is not None:
            if line and not line.startswith(" ") and not found[-1]:
                break  # a paragraph behind an empty line
            found.append(line)
    return found


def _referred(text: str) -> list[str] | None:
    reference = REFERENCE.fullmatch(text)
    return re.findall(r"`([\w.]+)`", reference[1]) if reference else None


def _error(name: str) -> type[BaseException]:
    module, _, last = name.rpartition(".")
    assert module in ("", "anyio"), f"no public name: {name}"
    found = getattr(anyio, last) if module else PUBLIC.get(last) or getattr(builtins, last, None)
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        pytest.fail(f"no exception: {name}")
    return found


def _raised(name: str, seen: tuple[str, ...] = ()) -> set[type[BaseException]]:
    """Every exception that a docstring names, itself or by reference."""
    assert name not in seen, f"the references of {name} go in a circle"
    known = name in CONTRACTS or name in PROPERTIES or name in PUBLIC
    assert known, f"no public callable or class: {name}"
    section = _section(_documentation(name), "Raises")
    assert section is not None, f"{name} does not say what it raises"
    inline = " ".join(" ".join(section).split())
    if inline.startswith("nothing."):
        return set()
    entries = textwrap.dedent("\n".join(section[1:])).strip().splitlines()
    if section[0]:
        entries = [inline]
    found: set[type[BaseException]] = set()
    assert entries, f"{name}: nothing below Raises"
    for entry in entries:
        if entry.startswith(" ") or not entry:
            continue
        referred, errors = _referred(entry), ERRORS.fullmatch(entry)
        assert referred or errors, f"{name}: no exception and no reference: {entry!r}"
        for other in referred or ():
            found |= _raised(other, (*seen, name))
        if errors and not referred:
            found |= {_error(each) for each in errors[1].split(", ")}
    return found


def _cancellation(name: str, seen: tuple[str, ...] = ()) -> str:
    assert name not in seen, f"the references of {name} go in a circle"
    assert name in AWAITED or name in AWAITED_CLASSES, f"no public coroutine: {name}"
    section = _section(_documentation(name), "Cancellation")
    assert section is not None, f"{name} does not say what a cancellation leaves behind"
    text = " ".join(" ".join(section).split())
    referred = _referred(text)
    if referred is None:
        assert not text.startswith("as `"), f"{name}: no reference: {text!r}"
        return text
    return " ".join(_cancellation(other, (*seen, name)) for other in referred)


def _raise_statements(call: Callable[..., Any]) -> set[type[BaseException]]:
    """The exceptions that a function's own `raise` statements name."""
    try:
        source = inspect.getsource(inspect.unwrap(call))
    except TypeError:
        return set()  # in C
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        raised = node.exc if isinstance(node, ast.Raise) else None
        called = raised.func if isinstance(raised, ast.Call) else raised
        if isinstance(called, ast.Name):
            each = MADE_BY.get(called.id) or PUBLIC.get(called.id)
            each = each or getattr(builtins, called.id, None)
            if isinstance(each, type) and issubclass(each, BaseException):
                found.add(each)
    return found


# -- the contracts --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CALLABLES, *CLASSES])
def test_every_public_callable_has_a_docstring(name: str) -> None:
    assert len(_documentation(name)) > 15


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_property_has_a_docstring(name: str) -> None:
    described = (property, types.GetSetDescriptorType)
    silent = [
        full
        for full, member in _members(CLASSES[name])
        if isinstance(member, described) and not (member.__doc__ or "").strip()
    ]
    assert silent == []


@pytest.mark.parametrize("name", [*CONTRACTS, *CHECKING_CLASSES, *CONSTRUCTED])
def test_every_contract_says_what_can_be_raised(name: str) -> None:
    documented = tuple(_raised(name))
    call = CALLABLES.get(name)
    if call is None:
        call = getattr(PUBLIC[name], "__post_init__", None) or PUBLIC[name].__init__
    missing = {each for each in _raise_statements(call) if not issubclass(each, documented)}
    assert missing == set()


@pytest.mark.parametrize("name", PROPERTIES)
def test_properties_that_raise_document_it(name: str) -> None:
    stated = _raise_statements(PROPERTIES[name])
    if stated or "Raises" in _documentation(name):
        documented = tuple(_raised(name))
        assert {each for each in stated if not issubclass(each, documented)} == set()


@pytest.mark.parametrize("name", [*AWAITED, *AWAITED_CLASSES])
def test_every_coroutine_says_what_cancelling_leaves(name: str) -> None:
    assert len(_cancellation(name)) > 10


@pytest.mark.parametrize("name", CONTRACTS)
def test_described_arguments_are_parameters(name: str) -> None:
    section = _section(_documentation(name), "Args")
    described = [
        each.strip()
        for names in re.findall(r"^ {4}(\w+(?:, \w+)*): ", "\n".join(section or ()), re.MULTILINE)
        for each in names.split(",")
    ]
    assert section is None or described or section[0].startswith("as ")
    parameters = inspect.signature(CALLABLES[name]).parameters
    keywords = ConnectionKeywords.__annotations__ if "keywords" in parameters else {}
    assert set(described) <= {*parameters, *keywords}


@pytest.mark.parametrize("name", [*CALLABLES, *CLASSES])
def test_names_in_public_docstrings_exist(name: str) -> None:
    missing = [
        f"{cls}.{member}"
        for cls, member in re.findall(r"`(?:aiordma\.)?([A-Z]\w+)\.(\w+)", _documentation(name))
        if cls in CLASSES and not hasattr(CLASSES[cls], member)
        if member not in getattr(CLASSES[cls], "__annotations__", {})
    ]
    assert missing == []


@pytest.mark.parametrize("cls", [aiordma.WorkRequest, aiordma.types.DatagramReceive])
def test_stub_repeats_the_docstrings_of_public_classes_in_c(cls: type) -> None:
    stub = ast.parse((ROOT / PACKAGE / "_native" / "_engine.pyi").read_text())
    (node,) = (
        each for each in stub.body if isinstance(each, ast.ClassDef) and each.name == cls.__name__
    )
    repeated = {
        each.name: ast.get_docstring(each)
        for each in node.body
        if isinstance(each, ast.FunctionDef) and ast.get_docstring(each)
    }
    methods = {name: each for name, each in vars(cls).items() if not name.startswith("_")}
    expected = {name: inspect.getdoc(each) for name, each in methods.items() if callable(each)}
    assert repeated == expected
    assert ast.get_docstring(node) == inspect.getdoc(cls)


# -- what is checked ------------------------------------------------------------------------------


def test_methods_in_c_and_inherited_ones_are_checked() -> None:
    assert {"WorkRequest.result", "Connection.post_send", "Chain.post_write"} <= set(CONTRACTS)
    assert {"Resource.close", "MemoryRegion.close", "SharedReceiveQueue.aclose"} <= set(CONTRACTS)
    assert {"connect", "Listener.accept", "Connection.establish"} <= set(AWAITED)
    assert "WorkRequest" in AWAITED_CLASSES

"""Each parameter of each public function is described, with its unit and the meaning of None.

The default itself is in the signature. `Args: as `X`.` and `parameter: as `X`.` refer to another
call; a call of another package is named without backquotes ("as of asyncio's").
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest

from docs.site import reference
from tests.unit.test_docstrings import CONSTRUCTED

ENTRY = re.compile(r"\*{0,2}\w+(?:, \*{0,2}\w+)*: ")
CONTINUED = re.compile(r"^( {4}\w+(?:, \w+)*,)\n {8}", re.MULTILINE)
"""The names of an entry that do not fit into its first line."""
REFERENCE = re.compile(r"(?:\bas(?: of)? `([\w.]+)`|\bsee (ConnectionOptions)\b)")
OTHERS = re.compile(r"\bas (?:of )?[a-z][\w.]+(?:'s|\.\w+)")
UNITS = re.compile(r"second|\bms\b|factor|probabilit|fraction|0 to 1|percent")
"""What the description of a float names."""

Described = tuple[Callable[..., Any], str]


def _callables() -> Iterator[tuple[str, Described]]:
    """Every public function, method and constructor, with the docstring that describes it."""
    for name in sorted(reference.public_names()):
        thing = reference.find(name)
        if not reference.is_ours(thing):
            continue
        if not isinstance(thing, type):
            if callable(thing):
                yield name, (thing, thing.__doc__ or "")
            continue
        if reference.is_constructed(thing):
            yield name, (thing, thing.__doc__ or "")
        for member, owner in reference.members(thing).items():
            found = vars(owner)[member]
            found = getattr(found, "__func__", found)
            if not isinstance(found, property):
                yield f"{name}.{member}", (found, found.__doc__ or "")


CALLABLES = dict(_callables())
RECORDS = (
    "ConnectionOptions",
    "QueuePairAddress",
    "RemoteMemory",
    "verbs.AddressVector",
    "verbs.Capacity",
    "verbs.ConnectionParameters",
    "verbs.Ece",
)
"""Data classes whose objects programs make."""


def _public(name: str) -> str:
    return name if name in CALLABLES else f"verbs.{name}"


def test_classes_that_programs_construct_are_checked() -> None:
    assert {_public(name) for name in CONSTRUCTED} <= set(CALLABLES)


@pytest.mark.parametrize("name", RECORDS)
def test_each_field_that_programs_set_is_described(name: str) -> None:
    text = reference.page(next(key for key in reference.PAGES if name in reference.PAGES[key][2]))
    described = re.findall(rf"py:attribute}} {name.rpartition('.')[2]}\.(\w+)", text)
    for names in re.findall(r"^- (`.*?)(?: \(|: )", text, re.MULTILINE):
        described += re.findall(r"`(\w+)`", names)
    fields = {each.name for each in dataclasses.fields(reference.find(name))}
    assert fields - set(described) == set()


def _parameters(name: str) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(CALLABLES[name][0]).parameters
    return {each: parameters[each] for each in parameters if each not in ("self", "cls")}


def _descriptions(name: str, seen: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the description of each parameter, with those that it refers to."""
    assert name not in seen, f"the references of {name} go in a circle"
    text = inspect.cleandoc(CALLABLES[name][1])
    lines = iter(CONTINUED.sub(r"\1 ", text).splitlines())
    found: dict[str, str] = {}
    names: list[str] = []
    for line in lines:
        if not line.startswith("Args:"):
            continue
        if whole := REFERENCE.search(line):
            return _descriptions(_full(whole[1], name), (*seen, name))
        if OTHERS.search(line):
            return dict.fromkeys(_parameters(name), line)
        for inner in lines:
            if inner and not inner.startswith(" "):
                break
            entry = ENTRY.match(inner[4:]) if inner[:5] != " " * 5 else None
            if entry:
                names = [each.strip(" *") for each in entry[0][:-2].split(", ")]
                found |= dict.fromkeys(names, "")
                text = inner[4 + entry.end() :]
            else:
                text = inner
            for each in names:
                found[each] += text.strip() + " "
        break
    for parameter, text in found.items():
        referred = REFERENCE.search(text)
        if referred and referred[1]:
            other = _descriptions(_full(referred[1], name), (*seen, name))
            keywords = _parameters(name).get(parameter)
            if keywords is None or keywords.kind is not inspect.Parameter.VAR_KEYWORD:
                assert parameter in other, f"{name}: {referred[1]} does not describe {parameter}"
                found[parameter] += other[parameter]
    return found


def _full(referred: str, name: str) -> str:
    """Return the name of a callable to which the docstring of another refers."""
    package = name.rpartition(".")[0]
    referred = referred.removeprefix("aiordma.")
    for candidate in (referred, f"{package}.{referred}", f"verbs.{referred}", f"types.{referred}"):
        if candidate in CALLABLES:
            return candidate
    raise AssertionError(f"{name} refers to {referred}: no public callable")


def _is_elsewhere(text: str) -> bool:
    """Whether another description has the rest, or there is none."""
    return any(each.search(text) for each in (OTHERS, REFERENCE, re.compile("without effect")))


@pytest.mark.parametrize("name", CALLABLES)
def test_every_parameter_is_described(name: str) -> None:
    described = _descriptions(name)
    expected = set(_parameters(name))
    for each, parameter in _parameters(name).items():
        if parameter.kind is parameter.VAR_KEYWORD and each not in described:
            for keywords in get_args(parameter.annotation):  # Unpack[...]
                expected |= set(keywords.__annotations__)
                expected.discard(each)
    assert expected - set(described) == set()


@pytest.mark.parametrize("name", CALLABLES)
def test_a_default_of_none_is_explained(name: str) -> None:
    described = _descriptions(name)
    unexplained = {
        each
        for each, parameter in _parameters(name).items()
        if parameter.default is None and "None" not in described[each]
        if not _is_elsewhere(described[each])
    }
    assert unexplained == set()


@pytest.mark.parametrize("name", CALLABLES)
def test_a_number_has_its_unit(name: str) -> None:
    described = _descriptions(name)
    without = {
        each
        for each, parameter in _parameters(name).items()
        if "float" in str(parameter.annotation) and each != "seconds"
        if not UNITS.search(described[each])
        if not _is_elsewhere(described[each])
    }
    assert without == set()

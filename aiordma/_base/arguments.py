"""Checks of arguments. Each error names the function, the parameter, its value, and the expected
value (pure).

`call` is the function's name as typed. Without it, the text begins with the parameter's name.
"""

import difflib
import math
import reprlib
import sys
from collections.abc import Iterable
from enum import IntEnum
from operator import index
from typing import Any, TypeVar

if sys.version_info >= (3, 12):
    from collections.abc import Buffer as Buffer
else:
    from typing_extensions import Buffer as Buffer

Member = TypeVar("Member", bound=IntEnum)

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_MOST_BYTES = 24
_MOST_BITS = 128
_BITS: dict[float, int] = {(1 << bits) - 1: bits for bits in (16, 24, 32, 64)}


def shown(value: object) -> str:
    """Return a value as messages show it: its repr, truncated if it is long."""
    if isinstance(value, bytes | bytearray) and len(value) > _MOST_BYTES:
        return f"{bytes(value[:_MOST_BYTES])!r}..."
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"an int of {value.bit_length()} bits"  # Python refuses to print thousands of digits
    return _SHORT.repr(value)


def _where(call: str) -> str:
    return f"{call}(): " if call else ""


def wrong_type(value: object, name: str, expected: str, call: str = "") -> TypeError:
    """Return the error for a value of an unsuitable type."""
    kind = type(value).__name__
    return TypeError(f"{_where(call)}{name}={shown(value)} ({kind}): expected {expected}")


def wrong_value(value: object, name: str, expected: str, call: str = "") -> ValueError:
    """Return the error for an unsuitable value of the right type."""
    return ValueError(f"{_where(call)}{name}={shown(value)}: expected {expected}")


def _out_of_range(value: float, name: str, least: float, most: float, call: str = "") -> ValueError:
    """Return the error for a number that is out of range."""
    bits = f" ({_BITS[most]} bits)" if most in _BITS else ""
    return ValueError(f"{_where(call)}{name}={shown(value)} is not in {least}..{most}{bits}")


def whole_number(value: Any, name: str, least: int, most: int, call: str = "") -> int:
    """Return a whole number as an int, after checking its range. numpy's integers are accepted,
    bools are not.

    Raises:
        TypeError: the value is not a whole number.
        ValueError: the value is out of range.
    """
    if type(value) is not int:
        try:
            if isinstance(value, bool):
                raise TypeError
            value = index(value)
        except TypeError:
            expected = f"a whole number in {least}..{most}"
            raise wrong_type(value, name, expected, call) from None
    if not least <= value <= most:
        raise _out_of_range(value, name, least, most, call)
    return int(value)


def within_device(value: int, name: str, least: int, most: int, device: str) -> None:
    """Check a whole number against a limit of the device of that name.

    Raises:
        ValueError: the value is out of range; the message has the limit and the device.
    """
    if not least <= value <= most:
        raise ValueError(f"{name}={value}: {device} has {least}..{most}")


def seconds(value: Any, name: str, call: str = "") -> float:
    """Return a time in seconds.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is NaN.
    """
    if isinstance(value, bool) or not hasattr(type(value), "__float__"):
        raise wrong_type(value, name, "a number of seconds", call)
    try:
        number = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    if math.isnan(number):
        raise wrong_value(value, name, "a number of seconds", call)
    return number


def seconds_within(value: Any, name: str, least: float, most: float, call: str = "") -> float:
    """Return a time in seconds, after checking its range.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is NaN or out of range.
    """
    number = seconds(value, name, call)
    if not least <= number <= most:
        raise _out_of_range(value, name, least, most, call)
    return number


def optional_seconds(value: Any, name: str, call: str = "") -> float | None:
    """Return a time in seconds, or None for None. Raises the errors of `seconds`."""
    return None if value is None else seconds(value, name, call)


def text(value: Any, name: str, expected: str, call: str = "") -> str:
    """Return a str for C: not empty, and without a NUL.

    Raises:
        TypeError: the value is not a str.
        ValueError: the value is empty or contains a NUL.
    """
    if not isinstance(value, str):
        raise wrong_type(value, name, expected, call)
    if not value:
        raise wrong_value(value, name, expected, call)
    if "\0" in value:
        raise ValueError(f"{_where(call)}{name}={shown(value)} holds a NUL")
    return value


def data(value: Any, name: str, call: str = "") -> bytes:
    """Return the value as bytes, by copying a bytearray or a memoryview.

    Raises:
        TypeError: the value is not bytes, bytearray or memoryview.
    """
    if isinstance(value, bytes):
        return value
    if not isinstance(value, bytearray | memoryview):
        expected = f"bytes{', such as text.encode()' if isinstance(value, str) else ''}"
        raise wrong_type(value, name, expected, call)
    return bytes(value)


def checked_gid(value: Any, call: str = "") -> bytes:
    """Return the bytes of an argument `gid`.

    Raises:
        TypeError: it is no bytes.
        ValueError: it does not have 16 bytes.
    """
    gid = data(value, "gid", call)
    if len(gid) != 16:
        raise ValueError(f"{_where(call)}gid has {len(gid)} bytes: expected 16")
    return gid


def instance(
    value: object, name: str, kind: type[object], call: str = "", expected: str = ""
) -> None:
    """Check that the value is an instance of a class.

    Raises:
        TypeError: the value is not an instance of `kind`.
    """
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise wrong_type(value, name, expected or f"{article} {kind.__name__}", call)


def resource(value: object, name: str, expected: str, call: str = "") -> None:
    """Check that the value is an object of the driver, or a stand-in. cffi later checks its type.

    Raises:
        TypeError: the value has no `pointer`.
    """
    if not hasattr(value, "pointer"):
        raise wrong_type(value, name, expected, call)


def member(value: Any, name: str, kind: type[Member], call: str = "") -> Member:
    """Return a member of an enumeration, given the member or its number.

    Raises:
        TypeError: the value is neither a member nor an int.
        ValueError: no member has this number.
    """
    if isinstance(value, kind):
        return value
    known = [f"{kind.__name__}.{one.name}" for one in kind]
    expected = f"one of {', '.join(known)}" if len(known) <= 16 else f"a {kind.__name__}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(value, name, expected, call)
    for one in kind:
        if one == value:
            return one
    raise wrong_value(value, name, expected, call)


def buffers(value: Any, name: str, call: str, *single: type) -> list[Any]:
    """Return the parts of one request as a list, without checking the parts.

    Args:
        value: the argument.
        name: the parameter.
        call: the function.
        single: classes that are one buffer although they can be iterated, in addition to str,
            bytes, bytearray and memoryview.

    Raises:
        TypeError: the value is one buffer, or cannot be iterated.
    """
    if type(value) is list:
        return value.copy()
    if isinstance(value, (str, bytes, bytearray, memoryview, *single)):
        raise wrong_type(value, name, f"a list of buffers, such as [{name}]", call)
    try:
        return list(value)
    except TypeError:
        raise wrong_type(value, name, "a list of buffers", call) from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the hint for an unknown name: the most similar known name, or else all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"

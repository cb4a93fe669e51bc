"""Write the pages of the API reference, in Markdown, from the docstrings.

Public docstrings have one form (docs/design.md, "Docstrings"), and tests/unit/test_docstrings.py
checks it. The signatures are those of the source, because a type alias is shorter there than what
it stands for; for the classes that are written in C, those of the stub (`_native/_engine.pyi`).
"""

import ast
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import aiordma
import aiordma.streams
import aiordma.testing
import aiordma.verbs.capabilities
from aiordma import types, verbs

__all__ = (
    "INDEX",
    "INTEGRATIONS",
    "PAGES",
    "descriptions",
    "find",
    "is_constructed",
    "is_ours",
    "members",
    "page",
    "public_names",
)

ROOT = Path(__file__).resolve().parents[2]

INTEGRATIONS: dict[str, tuple[ModuleType, str]] = {
    name: (importlib.import_module(f"aiordma.integrations.{name}"), introduction)
    for name, introduction in {
        "arrays": "Arrays by name. [Arrays and tensors](../arrays.md) explains it. `pip install "
        "'aiordma[numpy]'`.",
        "dask": "A backend of Dask's distributed. [Dask over RDMA](../dask.md) explains it. A "
        "program need not import it: distributed finds it by its entry point.",
        "valkey": "A client of Valkey. [Valkey over RDMA](../valkey.md) explains it.",
        "ray": "A transport for Ray. [Arrays and tensors](../arrays.md#ray) explains it. `pip "
        "install 'aiordma[ray]'`.",
        "torch": "A transport for torch. [Arrays and "
        "tensors](../arrays.md#torch-s-one-sided-transports) explains it. A program need not "
        "import it: torch finds it by its entry point.",
        "httpcore": "httpx and httpcore over [byte streams](../streams.md). `pip install "
        "'aiordma[httpx]'`.",
        "opentelemetry": "[Observability](../observability.md) explains it. `pip install "
        "'aiordma[opentelemetry]'`.",
        "prometheus": "[Observability](../observability.md) explains it. `pip install "
        "'aiordma[prometheus]'`.",
    }.items()
}
"""The modules that put aiordma into other packages, and an introduction to each."""

_MODULES = (aiordma, types, verbs, verbs.capabilities, aiordma.streams, aiordma.testing)
_MODULES += tuple(module for module, _ in INTEGRATIONS.values())

PAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "opening": (
        "Connect, listen, open",
        "The openers return an `Opening`: `async with` closes the object at the end of the block. "
        "After `await`, the program closes it.",
        (
            "connect",
            "listen",
            "prepare_connection",
            "reconnecting",
            "types.Reconnecting",
            "types.Session",
            "open_datagram",
            "open_domain",
            "open_shared_receive",
            "open_queue_pair",
            "open_rails",
            "types.Opening",
            "resolve",
            "types.ResolvedAddress",
            "devices",
            "run",
            "new_event_loop",
        ),
    ),
    "options": (
        "Options of a connection",
        "`connect`, `listen` and the other openers take them as `options=`. "
        "[Sizing and memory](../memory.md) says how to choose the numbers, and "
        "[dead peers and time-outs](../dead-peers.md) the times.",
        (
            "ConnectionOptions",
            "types.ConnectionKeywords",
            "verbs.ConnectionParameters",
            "verbs.Ece",
        ),
    ),
    "connection": (
        "Connection",
        "",
        (
            "Connection",
            "types.Message",
            "types.ConnectionInfo",
            "types.Chain",
            "types.Counter",
            "Blocks",
            "types.BlockTransfer",
            "Rails",
            "EndOfStream",
        ),
    ),
    "listener": ("Listener", "", ("Listener", "ConnectionRequest")),
    "requests": (
        "Work requests and completions",
        "",
        ("WorkRequest", "verbs.WorkCompletion"),
    ),
    "statistics": (
        "Statistics and traces",
        "[Observability](../observability.md) explains them.",
        (
            "statistics",
            "types.DeviceStatistics",
            "types.RequestStatistics",
            "types.ListenerStatistics",
            "trace",
            "types.Trace",
            "types.TracedRequest",
        ),
    ),
    "memory": (
        "Memory, domains, grants",
        "",
        (
            "RemoteMemory",
            "verbs.LocalMemory",
            "verbs.RegistrableMemory",
            "MemoryRegion",
            "types.MemorySlice",
            "Access",
            "types.RegistrationCache",
            "Domain",
            "types.Grant",
            "types.BoundWindow",
            "verbs.MemoryWindow",
            "verbs.MemoryWindowType",
        ),
    ),
    "shared-receive": (
        "Shared receive queues",
        "",
        ("SharedReceiveQueue", "verbs.RawSharedReceiveQueue"),
    ),
    "datagrams": (
        "Datagrams and multicast",
        "",
        (
            "Datagram",
            "types.DatagramMessage",
            "types.DatagramArrival",
            "types.DatagramReceive",
            "DatagramPeer",
            "types.MulticastGroup",
            "verbs.AddressVector",
            "verbs.AddressHandle",
            "verbs.GRH_BYTES",
        ),
    ),
    "errors": (
        "Errors",
        "",
        (
            "RdmaError",
            "RdmaConnectionError",
            "AddressError",
            "RouteError",
            "UnreachableError",
            "RejectedError",
            "ConnectTimeoutError",
            "PeerGoneError",
            "DisconnectedError",
            "DeviceRemovedError",
            "streams.StreamProtocolError",
            "MulticastError",
            "WorkCompletionError",
            "FlushedError",
            "verbs.PeerFlushedError",
            "verbs.LocalAccessError",
            "verbs.LocalLengthError",
            "verbs.LocalProtectionError",
            "verbs.LocalQueuePairError",
            "ReceiverNotReadyError",
            "RemoteAccessError",
            "verbs.RemoteInvalidRequestError",
            "verbs.RemoteOperationError",
            "RetryExceededError",
            "VerbsCallError",
            "verbs.PartialPostError",
            "DeviceEventError",
            "NoDeviceError",
            "DeviceRequirementError",
            "NotSupportedError",
            "NotPostedError",
            "ClosedError",
            "BusyError",
            "QueueFullError",
            "EventLoopError",
            "ForkError",
        ),
    ),
    "streams": (
        "aiordma.streams",
        "[Byte streams](../streams.md) explains them.",
        tuple(f"streams.{each}" for each in aiordma.streams.__all__ if each[-5:] != "Error"),
    ),
    "testing": (
        "aiordma.testing",
        "[Testing without RDMA hardware](../testing.md) explains them.",
        tuple(f"testing.{name}" for name in aiordma.testing.__all__),
    ),
    "verbs": (
        "Verbs without an event loop",
        "[The verbs table](../verbs.md) has the C function of each.",
        (
            "verbs.Device",
            "verbs.Context",
            "verbs.DeviceAttributes",
            "verbs.PortAttributes",
            "verbs.GidEntry",
            "verbs.ProtectionDomain",
            "verbs.CompletionQueue",
            "verbs.CompletionChannel",
            "verbs.QueuePair",
            "verbs.QueuePairAttributes",
            "verbs.Capacity",
            "verbs.Sge",
            "verbs.DmabufRegion",
            "verbs.SendWork",
            "QueuePairAddress",
            "types.UnmanagedConnection",
            "verbs.AsyncEvents",
            "verbs.AsyncEvent",
            "verbs.Resource",
            "verbs.RawPart",
            "verbs.capabilities.CompletionModerationCapabilities",
            "verbs.capabilities.OnDemandCapabilities",
            "verbs.capabilities.PacketPacingCapabilities",
            "verbs.capabilities.ReceiveHashCapabilities",
            "verbs.capabilities.SegmentationCapabilities",
            "verbs.capabilities.TagMatchingCapabilities",
        ),
    ),
    "connection-manager": (
        "Connection manager objects",
        "[The connection manager](../connection-manager.md) lists its events.",
        ("verbs.EventChannel", "verbs.CmEvent", "verbs.Identifier"),
    ),
    "enums": (
        "Enumerations",
        "The values are those of the C headers.",
        (
            "verbs.AsyncEventType",
            "verbs.AtomicCapability",
            "verbs.CmEventType",
            "verbs.CompletionQueueFlag",
            "verbs.GidType",
            "verbs.LinkLayer",
            "verbs.MemoryAdvice",
            "verbs.Mtu",
            "verbs.PortSpace",
            "verbs.PortState",
            "verbs.QueuePairState",
            "verbs.QueuePairType",
            "verbs.SendFlag",
            "verbs.Transport",
            "verbs.WorkCompletionFlag",
            "verbs.WorkCompletionOpcode",
            "verbs.WorkCompletionStatus",
            "verbs.WorkRequestOpcode",
            "verbs.capabilities.DeviceCapability",
            "verbs.capabilities.OnDemandOperation",
            "verbs.capabilities.OnDemandPaging",
            "verbs.capabilities.RawPacketCapability",
        ),
    ),
    **{
        name: (
            f"aiordma.integrations.{name}",
            introduction,
            tuple(f"integrations.{name}.{each}" for each in module.__all__),
        )
        for name, (module, introduction) in INTEGRATIONS.items()
    },
}
"""The pages: the title, an introduction, and the names of the package that they describe."""

INDEX = """# API reference

Each public class and function of aiordma, from its docstring. A docstring is a contract: what the
call does, its arguments, with units and defaults, what it raises, and what remains after a
cancellation. `help(aiordma.connect)` prints the same.
[Errors](../errors.md) describes the exceptions.
"""

_HEADER = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Cancellation|See): ?(.*)")
_ENTRY = re.compile(r"([\w.*]+(?:, [\w.*]+)*)(?: \(([^)]*)\))?: (.*)")
_CONTINUED = re.compile(r"^(\w+(?:, \w+)*,)\n {4}", re.MULTILINE)
"""The names of an entry that do not fit into its first line."""
_LISTS = ("Args", "Attributes", "Raises")

Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def public_names() -> set[str]:
    """Every public name, relative to the package: those of `aiordma` itself without a prefix."""
    names = set(aiordma.__all__)
    for module in _MODULES[1:]:
        prefix = module.__name__.removeprefix("aiordma.")
        for name in module.__all__:
            if getattr(aiordma, name, None) is not getattr(module, name):
                names.add(f"{prefix}.{name}")
    return names


def page(key: str) -> str:
    """Return the Markdown of a page."""
    title, introduction, _ = PAGES[key]
    parts = [f"# {title}", introduction, descriptions(key)]
    return "\n\n".join(part for part in parts if part)


def descriptions(key: str) -> str:
    """Return the Markdown that describes the names of a page."""
    title, _, names = PAGES[key]
    modules = {name.rpartition(".")[0] for name in names}
    module = modules.pop() if len(modules) == 1 else ""
    current = f"aiordma.{module}".rstrip(".")
    parts = [f"```{{py:currentmodule}} {current}\n```"]
    for name in names:
        if name != title:
            parts.append(f"## {name.split('.')[-1]}")
        parts += _described(name)
    text = "\n\n".join(part for part in parts if part) + "\n"
    if module:
        text = re.sub(rf"^(::::{{py:\w+}} ){re.escape(module)}\.", r"\1", text, flags=re.MULTILINE)
    return re.sub(r"(?<!\]\()(?<![`/])docs/([\w-]+\.md)", r"[](/\1)", text)


# -- what is described ----------------------------------------------------------------------------


def find(name: str) -> Any:
    """Return what has a public name."""
    thing: Any = aiordma
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


def is_ours(thing: Any) -> bool:
    """Whether a class or function is of this package."""
    return (getattr(thing, "__module__", None) or "").split(".")[0] == "aiordma"


def _described(name: str) -> Iterator[str]:
    thing = find(name)
    if not is_ours(thing) and isinstance(thing, type):
        yield _directive("class", name, [], f"anyio's: `{thing.__module__}.{thing.__name__}`.")
    elif isinstance(thing, type):
        yield from _class(name, thing)
    elif callable(thing) and not isinstance(thing, ModuleType):
        yield _function("function", name, thing)
    else:
        value = f"{thing!r}" if isinstance(thing, int) else ""
        options = [f":value: {value}"] if value else []
        yield _directive("data", name, options, _DATA.get(name, ""))


_DATA = {
    "verbs.GRH_BYTES": "The bytes of the GRH before each datagram in its receive.",
    "verbs.RawPart": "The type of a part of a raw work request: registered memory, `Sge`, or, in "
    "an inline request, any buffer.",
    "verbs.LocalMemory": "The type of memory that can be posted: any object with a buffer "
    "(`collections.abc.Buffer`), a `MemoryRegion` or a slice of one.",
    "verbs.RegistrableMemory": "The type of memory that can be registered: any object with a "
    "buffer, and arrays and tensors that describe their memory in another form: "
    "`Connection.register` lists them.",
}


def _class(name: str, cls: type) -> Iterator[str]:
    kind = "exception" if issubclass(cls, BaseException) else "class"
    text = _documented(cls.__doc__ or "", cls)
    if issubclass(cls, enum.Enum):
        form = "#x" if issubclass(cls, enum.Flag) else ""
        text += "\n\n" + "\n".join(f"- `{each.name}` = {each.value:{form}}" for each in cls)
    body = (
        f"Bases: {', '.join(f'`{base}`' for base in bases(cls))}\n\n" if bases(cls) else ""
    ) + text
    node = _node(cls.__name__, cls.__doc__)
    init = _init(cls) if is_constructed(cls) else None
    signature = _arguments(init, vars(cls)["__init__"]) if init else ""
    yield _directive(kind, name + signature, [], body)
    if issubclass(cls, enum.Enum):
        return
    for member, owner in members(cls).items():
        yield from _member(f"{name}.{member}", vars(owner)[member], owner)
    if isinstance(node, ast.ClassDef):
        yield from _instance_attributes(name, node)


def is_constructed(cls: type) -> bool:
    """Whether programs make objects of a class by calling it."""
    return "__init__" in vars(cls) and "\nArgs:" in inspect.cleandoc(cls.__doc__ or "")


def bases(cls: type) -> list[str]:
    """Return the names of the base classes that a program knows."""
    return [name for name in map(_public, cls.__bases__) if name]


def _public(cls: type) -> str:
    """Return the name under which programs know a class, "" if they do not."""
    if cls is object:
        return ""
    if not is_ours(cls):
        return (
            cls.__name__
            if cls.__module__ == "builtins"
            else f"{cls.__module__.split('.')[0]}.{cls.__name__}"
        )
    for module in _MODULES:
        if getattr(module, cls.__name__, None) is cls:
            return cls.__name__
    return ""


def members(cls: type) -> dict[str, type]:
    """Return the methods and properties of a class that its own description has, with the class
    that defines each: those of public bases are described there."""
    found = {}
    for name in dict.fromkeys(each for base in cls.__mro__ for each in vars(base)):
        owner = next(base for base in cls.__mro__ if name in vars(base))
        member = vars(owner)[name]
        shown = isinstance(member, property | staticmethod | classmethod) or (
            callable(member) and not isinstance(member, type) and bool(member.__doc__)
        )
        inherited = owner is not cls and _public(owner)
        if shown and not name.startswith("_") and is_ours(owner) and not inherited:
            found[name] = owner
    return found


def _member(name: str, member: Any, owner: type) -> Iterator[str]:
    if isinstance(member, property):
        returns = _node(f"{owner.__name__}.{name.split('.')[-1]}", member.__doc__)
        options = []
        if isinstance(returns, ast.FunctionDef) and returns.returns is not None:
            options.append(f":type: {ast.unparse(returns.returns)}")
        yield _directive("property", name, options, _documented(member.__doc__ or "", None))
        return
    kind = "method"
    if isinstance(member, staticmethod | classmethod):
        kind = "classmethod" if isinstance(member, classmethod) else "staticmethod"
        member = member.__func__
    yield _function(kind, name, member)


def _instance_attributes(name: str, node: ast.ClassDef) -> Iterator[str]:
    """The attributes with a docstring after them, in the class or in `__init__`."""
    bodies = [node.body]
    bodies += [
        each.body
        for each in node.body
        if isinstance(each, ast.FunctionDef) and each.name == "__init__"
    ]
    for body in bodies:
        for each, after in pairwise(body):
            if not isinstance(after, ast.Expr) or not isinstance(after.value, ast.Constant):
                continue
            if not isinstance(each, ast.AnnAssign) or not isinstance(after.value.value, str):
                continue
            attribute = ast.unparse(each.target).removeprefix("self.")
            if attribute.startswith("_"):
                continue
            options = [f":type: {ast.unparse(each.annotation)}"]
            text = inspect.cleandoc(after.value.value)
            yield _directive("attribute", f"{name}.{attribute}", options, text)


# -- signatures -----------------------------------------------------------------------------------


@cache
def _nodes() -> dict[str, list[Node]]:
    """Every class and function of the package, by its name within its module."""
    found: dict[str, list[Node]] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for each in body:
            if isinstance(each, Node):
                found.setdefault(prefix + each.name, []).append(each)
            if isinstance(each, ast.ClassDef):
                walk(each.body, f"{prefix}{each.name}.")
            if isinstance(each, ast.If):
                walk([*each.body, *each.orelse], prefix)

    sources = [*(ROOT / "aiordma").rglob("*.py"), ROOT / "aiordma" / "_native" / "_engine.pyi"]
    for path in sorted(sources):
        walk(ast.parse(path.read_text()).body, "")
    return found


def _node(qualified: str, documentation: str | None) -> Node | None:
    nodes = _nodes().get(qualified, [])
    same = [
        node
        for node in nodes
        if (ast.get_docstring(node) or "") == inspect.cleandoc(documentation or "")
    ]
    return (same or nodes or [None])[-1]


def _init(cls: type) -> Node | None:
    node = _node(cls.__name__, cls.__doc__)
    return (
        next(
            (each for each in node.body if isinstance(each, Node) and each.name == "__init__"), None
        )
        if isinstance(node, ast.ClassDef)
        else None
    )


def _arguments(node: Node | None, function: Any) -> str:
    """Return the parameters of a function, with the values of defaults that are constants."""
    if node is None or isinstance(node, ast.ClassDef):
        return "()"
    constants = getattr(inspect.unwrap(function), "__globals__", {})
    arguments = _without_self(node.args)
    for default in [*arguments.defaults, *arguments.kw_defaults]:
        value = constants.get(default.id) if isinstance(default, ast.Name) else None
        if isinstance(default, ast.Name) and isinstance(value, int | float | str):
            default.id = repr(value)
    return f"({ast.unparse(arguments)})"


def _without_self(arguments: ast.arguments) -> ast.arguments:
    first = [*arguments.posonlyargs, *arguments.args][:1]
    if first and first[0].arg in ("self", "cls"):
        arguments = ast.arguments(
            posonlyargs=arguments.posonlyargs[1:],
            args=arguments.args if arguments.posonlyargs else arguments.args[1:],
            vararg=arguments.vararg,
            kwonlyargs=arguments.kwonlyargs,
            kw_defaults=arguments.kw_defaults,
            kwarg=arguments.kwarg,
            defaults=arguments.defaults,
        )
    return arguments


def _function(kind: str, name: str, function: Any) -> str:
    qualified = getattr(function, "__qualname__", name).replace("<locals>.", "")
    node = _node(qualified, function.__doc__) or _node(name, function.__doc__)
    signature, options = "()", []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        signature = _arguments(node, function)
        if node.returns is not None:
            signature += " -> " + ast.unparse(node.returns).strip("'")
        if isinstance(node, ast.AsyncFunctionDef):
            options.append(":async:")
    return _directive(kind, name + signature, options, _documented(function.__doc__ or "", None))


# -- docstrings -----------------------------------------------------------------------------------


def _directive(kind: str, signature: str, options: list[str], body: str) -> str:
    name, _, rest = signature.partition("(")
    signature = name + (f"({rest}" if rest else "")
    head = f"::::{{py:{kind}}} {signature}"
    if name in public_names():  # the heading above is the entry in the table of contents
        options = [*options, ":no-contents-entry:"]
    return "\n".join([head, *options, "", body, "::::"])


def _documented(documentation: str, cls: type | None) -> str:
    """Return a docstring in Markdown."""
    sections: list[tuple[str, list[str]]] = [("", [])]
    for line in inspect.cleandoc(documentation).splitlines():
        header = _HEADER.fullmatch(line)
        if header:
            sections.append((header[1], [header[2]] if header[2] else []))
        else:
            sections[-1][1].append(line)
    parts = []
    for title, lines in sections:
        text = inspect.cleandoc("\n".join(["", *lines])) if title else "\n".join(lines)
        if not title:
            parts.append(text.replace("::\n", ":\n"))
        elif title in _LISTS and (entries := list(_entries(text, title, cls))):
            parts.append(f"**{title}**\n\n" + "\n".join(entries))
        else:
            parts.append(f"**{title}:** {text}")
    return "\n\n".join(part.strip("\n") for part in parts if part.strip())


def _entries(text: str, title: str, cls: type | None) -> Iterator[str]:
    entry = ""
    for line in _CONTINUED.sub(r"\1 ", text).splitlines():
        match = _ENTRY.fullmatch(line)
        if match and not line.startswith(" "):
            if entry:
                yield entry
            names = match[1].split(", ")
            kind = f" ({match[2]})" if match[2] else ""
            default = _default(cls, names[0]) if title == "Attributes" else ""
            entry = f"- {', '.join(f'`{name}`' for name in names)}{kind}{default}: {match[3]}"
        elif entry:
            entry += " " + line.strip()
        elif line.strip():
            entry = f"- {line.strip()}"
    if entry:
        yield entry


def _default(cls: type | None, name: str) -> str:
    fields = getattr(cls, "__dataclass_fields__", {})
    if name not in fields:
        return ""
    field = fields[name]
    kind = (
        field.type if isinstance(field.type, str) else getattr(field.type, "__name__", field.type)
    )
    default = f" = {field.default!r}" if "MISSING" not in repr(field.default) else ""
    return f" (`{kind}{default}`)"

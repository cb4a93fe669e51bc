"""Valkey over RDMA, for valkey-py's asyncio client (docs/valkey.md).

pool = ConnectionPool(connection_class=aiordma.integrations.valkey.RdmaConnection, host=...)
client = valkey.asyncio.Valkey(connection_pool=pool)
"""

try:
    import valkey  # noqa: F401
except ModuleNotFoundError as _error:
    raise ImportError(
        f"aiordma.integrations.valkey needs the package valkey: {_error}. "
        "Install it: pip install 'aiordma[valkey]'"
    ) from _error

from aiordma.integrations.valkey.client import RdmaConnection
from aiordma.integrations.valkey.control import ValkeyProtocolError
from aiordma.integrations.valkey.opening import (
    ValkeyOptions,
    ValkeyTransport,
    open_connection,
)

__all__ = (
    "RdmaConnection",
    "ValkeyOptions",
    "ValkeyProtocolError",
    "ValkeyTransport",
    "open_connection",
)

"""A communication backend of Dask's distributed, for addresses rdma://host:port (docs/dask.md).

distributed finds it by its entry point: LocalCluster(protocol="rdma"), dask scheduler --protocol
rdma. A program need not import this package.
"""

try:
    import distributed  # noqa: F401
except ModuleNotFoundError as _error:
    raise ImportError(
        f"aiordma.integrations.dask needs the package distributed: {_error}. "
        "Install it: pip install 'aiordma[dask]'"
    ) from _error

from aiordma.integrations.dask.backend import (
    RdmaBackend,
    RdmaComm,
    RdmaConnector,
    RdmaListener,
)
from aiordma.integrations.dask.frames import ProtocolError

__all__ = ("ProtocolError", "RdmaBackend", "RdmaComm", "RdmaConnector", "RdmaListener")

"""valkey-py's connection over RDMA."""

from collections.abc import Mapping
from typing import Any

from valkey.asyncio.connection import Connection

from aiordma.integrations.valkey.opening import ValkeyOptions, open_connection

__all__ = ("RdmaConnection",)


class RdmaConnection(Connection):
    """A connection of valkey-py's asyncio client, over RDMA.

        pool = ConnectionPool(connection_class=RdmaConnection, host="192.0.2.1", port=6379)
        client = Valkey(connection_pool=pool)

    Args:
        device: as of `aiordma.connect`.
        rdma: further options of `open_connection`; None: none.
        keywords: as of valkey.asyncio.Connection. Those of sockets have no effect: socket_keepalive
            (Valkey's own messages and `rdma={"keepalive": ...}` replace it) and socket_type.

    Raises: nothing; the errors of connecting are valkey-py's ConnectionError and TimeoutError.
    """

    def __init__(
        self,
        *,
        device: str = "auto",
        rdma: ValkeyOptions | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(**keywords)
        self.device: str = device
        self.rdma: ValkeyOptions = rdma or {}

    def repr_pieces(self) -> list[tuple[str, Any]]:
        """As of valkey-py's connections, with the transport.

        Raises: nothing.
        """
        pieces: list[tuple[str, Any]] = super().repr_pieces()  # type: ignore[no-untyped-call]
        return [*pieces, ("transport", "rdma")]

    def _connection_arguments(self) -> Mapping[str, Any]:
        given = self.socket_connect_timeout
        named = {"device": self.device, "timeout": 30.0 if given is None else given}
        return {**super()._connection_arguments(), **named, **self.rdma}

    async def _connect(self) -> None:
        self._reader, self._writer = await open_connection(**self._connection_arguments())

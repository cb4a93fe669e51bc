"""Where the connections of a listener take their receives and their protection domain from."""

import anyio

from aiordma._base.arguments import whole_number, wrong_type
from aiordma._base.options import ConnectionOptions
from aiordma._connection.domain import DomainArgument, DomainChoice
from aiordma._connection.shared_endpoint import SharedReceiveEndpoint
from aiordma._connection.shared_receive import SharedReceiveQueue
from aiordma._connection.shared_settings import MOST_WORK_REQUESTS, SharedReceiveSettings
from aiordma._endpoint.domain_state import DomainState
from aiordma._endpoint.endpoint import Endpoint
from aiordma._loop.threads import ACCEPTS
from aiordma.verbs import ProtectionDomain


class ListenerReceives:
    """The protection domain and the shared receive queues of one listener's connections: none, a
    given queue, or one pooled queue for each device and domain. A pooled queue has `shared_receive`
    receives, and the receive size, completion vector and `cqe` of the options.

    A queue in the domain of one accepted connection (`ConnectionRequest.accept`) closes with the
    last connection in that domain, because the program may close the domain then. The others are
    kept until `close`.
    """

    def __init__(
        self,
        shared_receive: SharedReceiveQueue | int | None,
        options: ConnectionOptions,
        domain: DomainArgument = None,
        call: str = "listen",
    ) -> None:
        self._given: SharedReceiveEndpoint | None = None
        self._settings: SharedReceiveSettings | None = None
        if isinstance(shared_receive, SharedReceiveQueue):
            self._given = shared_receive._endpoint
        elif shared_receive is not None:
            if isinstance(shared_receive, bool) or not isinstance(shared_receive, int):
                expected = "a SharedReceiveQueue, or a number of receives"
                raise wrong_type(shared_receive, "shared_receive", expected, "listen")
            whole_number(shared_receive, "shared_receive", 1, MOST_WORK_REQUESTS, "listen")
            self._settings = SharedReceiveSettings(
                shared_receive,
                1,
                shared_receive,
                options.receive_size,
                options.comp_vector,
                options.cqe,
            )
        self.domain: DomainChoice = self.choice(domain, call)
        self._made: dict[ProtectionDomain, SharedReceiveEndpoint] = {}
        self._making = anyio.Lock(fast_acquire=True)
        self._closed = False

    def choice(self, domain: DomainArgument, call: str) -> DomainChoice:
        """Check an argument `domain=` against the queues. Raises the errors of `DomainChoice`."""
        return DomainChoice(domain, call, self._given, pooled=self._settings is not None)

    async def on(
        self, endpoint: Endpoint, domain: DomainState | None
    ) -> SharedReceiveEndpoint | None:
        """Return the queue for a connection that is being accepted, or None. The connection becomes
        a member of a pooled queue here; `Endpoint.open` adds it to a given queue.

        Raises:
            ValueError: a setting exceeds the device's limit.
            NotSupportedError: the device has no shared receive queues.
            ClosedError: the queue was closed.
            VerbsCallError: the driver refused.
        """
        if self._settings is None:
            return self._given
        hub = endpoint.hub
        async with self._making:
            shared = self._made.get(endpoint.memory.domain)
            if shared is None or shared.cause is not None:
                if shared is not None:
                    shared.close_when_unused()  # it has failed
                shared = SharedReceiveEndpoint(endpoint.reactor, hub, self._settings, domain=domain)
                shared.calls.lane = ACCEPTS
                try:
                    await shared.open()
                    shared.join(endpoint)
                except BaseException:
                    await shared.aclose()
                    raise
                self._keep(endpoint.memory.domain, shared)
            else:
                shared.join(endpoint)
        if self._closed or domain is not self.domain.state:
            shared.close_when_unused()
        return shared

    def _keep(self, domain: ProtectionDomain, shared: SharedReceiveEndpoint) -> None:
        self._made[domain] = shared

        def forget() -> None:
            if self._made.get(domain) is shared:
                del self._made[domain]

        shared.teardown.on_closed.append(forget)

    def close(self) -> None:
        """Close each pooled queue once its last connection has ended."""
        self._closed = True
        for shared in list(self._made.values()):
            shared.close_when_unused()

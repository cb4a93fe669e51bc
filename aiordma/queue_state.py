"""Whether a queue pair may be posted on: its state, the cause of its end, and its port, which is
kept in step with the two."""

from aiordma._native import ffi
from aiordma.counted import Slots
from aiordma.drain import ClosedPort, Port
from aiordma.enums import QueuePairType
from aiordma.errors import ClosedError, VerbsCallError, check_positive_errno
from aiordma.event_loop import EventLoop
from aiordma.hub import DeviceHub
from aiordma.process import forked, here
from aiordma.request import OpenRequests
from aiordma.states import ConnectionState
from aiordma.verbs import Capacity, QueuePair

__all__ = ("QueueState",)

_CONNECTING = (ConnectionState.CONNECTING, ConnectionState.ACCEPTING)


class QueueState:
    """See the module."""

    def __init__(self, hub: DeviceHub, state: ConnectionState) -> None:
        self.hub = hub
        self.loop: EventLoop = hub.loop
        self._process = here.pid
        self._state = state
        self._cause: Exception | None = None
        self.queue_pair: QueuePair | None = None
        self.service = QueuePairType.RC
        self.capacity = Capacity()
        self.max_message = 0
        self.port = ClosedPort()
        self._open = OpenRequests()
        self._takes_own_receives = True

    @property
    def state(self) -> ConnectionState:
        """Where it is in a connection's life."""
        return self._state

    @state.setter
    def state(self, state: ConnectionState) -> None:
        self._state = state
        self._tell_port()

    @property
    def cause(self) -> Exception | None:
        """Why it has ended, or is about to."""
        return self._cause

    @cause.setter
    def cause(self, cause: Exception | None) -> None:
        self._cause = cause
        self._tell_port()

    def open_port(self, sends: Slots, receives: Slots) -> None:
        """Let plain requests go the short way; once there is a queue pair."""
        assert self.queue_pair is not None
        self.port = Port(
            self,
            self.hub.steps,
            sends,
            receives,
            self._open,
            self.loop.asyncio_loop,
            self.hub.domain,
        )
        address = int(ffi.cast("uintptr_t", self.queue_pair.pointer))
        self.port.open(address, self.max_message, self.capacity.max_inline_data)
        self._tell_port()

    def _tell_port(self) -> None:
        usable = (
            self.queue_pair is not None
            and self._cause is None
            and self._state is not ConnectionState.CLOSED
        )
        self.port.can_receive = usable and self._takes_own_receives
        self.port.ready = (
            usable
            and self._state not in _CONNECTING
            and self.service in (QueuePairType.RC, QueuePairType.UC)
        )

    # -- whose it is, and whether it may be used ------------------------------------------------

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child of the process that made it: then it is not ours."""
        return self._process != here.pid

    def require_same_process(self) -> None:
        """Do nothing unless it is inherited.

        Raises:
            ForkError: it is.
        """
        if self._process != here.pid:
            raise forked(self._process, repr(self))

    def require_usable(self) -> None:
        """Do nothing while requests may be posted.

        Raises:
            ClosedError: you closed it.
            DisconnectedError: the peer did.
            WorkCompletionError: an earlier request broke it.
            ForkError: this is a child of the process that made it.
        """
        self.require_same_process()
        if self._state is ConnectionState.CLOSED:
            raise ClosedError("this connection is closed")
        if self._cause is not None:
            # Raised again and again: without this, every raise would add to one traceback.
            raise self._cause.with_traceback(None)
        if self.queue_pair is None:
            raise ClosedError("this connection has no queue pair yet")

    def require_sendable(self) -> None:
        """`require_usable`, and connected: before that a device keeps in its ring what it refuses,
        and sends it later."""
        self.require_usable()
        if self._state in _CONNECTING:
            raise ValueError(f"{self!r} is not connected yet: connect it before you send")

    # -- what the port tells --------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """End, with this error as the cause."""
        raise NotImplementedError

    def post_refused(self, error: int, is_receive: bool) -> None:
        """Raise what the device refused a post with; nothing was posted, nothing is held.

        Raises:
            VerbsCallError: always.
        """
        assert self.queue_pair is not None
        name = "ibv_post_recv" if is_receive else "ibv_post_send"
        check_positive_errno(error, name, self.queue_pair.explain(1))

    def doorbell_failed(self, error: int) -> None:
        """End: the device has a request and could not be told, so that it may be executed yet."""
        assert self.queue_pair is not None
        failure = VerbsCallError(error, "ibv_post_send", self.queue_pair.explain(1))
        failure.was_taken = True
        self.fail(failure)

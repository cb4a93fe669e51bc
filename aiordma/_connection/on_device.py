"""What connections and datagram sockets share: the device, the queue pair's number, the counters,
the registration of memory, and the finalizer."""

from aiordma._base.enums import Access
from aiordma._base.process import never_pickled
from aiordma._base.states import ConnectionState
from aiordma._base.statistics import RequestStatistics
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.registration import register, register_in_thread
from aiordma.verbs import Context, ProtectionDomain, RegistrableMemory
from aiordma.verbs.memory import MemoryRegion


class OnDevice:
    """See the module."""

    _endpoint: Endpoint
    _begun = False
    """Whether a finalizer has to close it, with a warning."""

    __reduce__ = never_pickled

    @property
    def device_name(self) -> str:
        """The name of the RDMA device in use."""
        return self._endpoint.hub.context.device_name

    @property
    def qp_num(self) -> int:
        """The number of the local queue pair (`ibv_qp.qp_num`), which identifies it in the device,
        in traces and in the peer's `query().dest_qp_num`. The property does not change at the
        close, but the device can then give the number to another queue pair."""
        return self._endpoint.pair.number

    @property
    def context(self) -> Context:
        """The opened device (`ibv_context`), for queries and asynchronous events. All users of
        the device in this event loop share it: do not close it.

        The property returns the same object after the close. The end of the event loop closes the
        object; its calls then raise ClosedError."""
        return self._endpoint.hub.context

    @property
    def protection_domain(self) -> ProtectionDomain:
        """The protection domain (`ibv_pd`) of the queue pair and of the regions that `register`
        returns: that of the argument `domain=`, or else the one that all users of the device in
        this event loop share. Do not close it. Close the objects that you create with it (a
        MemoryRegion, for instance) before it closes: the shared one closes at the event loop's end.

        After the close: as `context`."""
        return self._endpoint.memory.domain

    def statistics(self) -> RequestStatistics:
        """Return the counters of the requests. They remain after the end. The receives of a shared
        receive queue are counted there.

        Raises: nothing.
        """
        return RequestStatistics._of(self._endpoint.work.counters())

    def register(self, buffer: RegistrableMemory, access: Access | None = None) -> MemoryRegion:
        """Register a buffer for the requests of this connection or datagram socket and, with remote
        access, for the connection's peer.

        It stays registered until `region.close()` or until the connection or socket closes. The
        time to pin the memory grows with its pages: for large buffers, use `register_in_thread`,
        which does not block the event loop.

        Unless they were opened with `domain=`, all connections of this event loop on the same
        device share one protection domain. So with remote access, any peer of these connections can
        access the memory if it knows the rkey.

        Args:
            buffer: a bytearray, memoryview, mmap, array, numpy array or bytes; contiguous, not
                empty. Also an array with `__array_interface__`, or a tensor with DLPack, in the
                memory of the CPU (torch, jax): do not resize it while it is registered. Also an
                array or tensor on a GPU of CUDA, with `__cuda_array_interface__` or DLPack: its
                region is a DmabufRegion, which the CPU does not access. Wait until the GPU has
                written the tensor before you post it (torch.cuda.synchronize).
            access: the permitted access; None is LOCAL_WRITE for a writable buffer. Remote access
                is permitted only if named.

        Raises:
            TypeError: the object has no buffer, and describes no plain memory either; or the buffer
                is read-only and the access permits writing.
            ValueError: the buffer is empty or not contiguous.
            NotSupportedError: the device does not support a requested access (ON_DEMAND, MW_BIND);
                or the memory is a GPU's, and the device, the library or the GPU's driver cannot
                register it.
            VerbsCallError: the driver refused; the message names the limit.
            ClosedError, DisconnectedError, DeviceEventError, WorkCompletionError: the connection
                or socket has ended; the error is its cause.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        See: man ibv_reg_mr.
        """
        return register(self._endpoint, buffer, access)

    async def register_in_thread(
        self, buffer: RegistrableMemory, access: Access | None = None
    ) -> MemoryRegion:
        """Register a buffer as `register` does, in a worker thread.

        Args:
            buffer, access: as of `register`.

        Raises: as `Connection.register`.

        Cancellation: the call waits for the driver, and then deregisters the buffer.
        """
        return await register_in_thread(self._endpoint, buffer, access)

    def __del__(self) -> None:
        if (
            self._begun
            and self._endpoint.handshake.state is not ConnectionState.CLOSED
            and not self._endpoint.is_inherited
        ):
            self._endpoint.teardown.forget()

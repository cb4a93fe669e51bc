"""Make queue pairs without librdmacm's help: two ways.

    python examples/own_queue_pair.py 192.0.2.1

First the connection manager carries the numbers of the queue pairs (rdma_establish), and the
options that the two devices agree to (ECE). Then two queue pairs are connected without it, as
ibv_rc_pingpong does. Both need RoCE or InfiniBand. Both sides are one program here, to be short.
"""

import argparse
import asyncio
import select
from contextlib import ExitStack

import aiordma
from aiordma.verbs import CmEventType, QueuePairState

OFFERED = aiordma.verbs.Ece(vendor_id=0x15B3, options=7)
KNOWN = 1


def expect(channel: aiordma.verbs.EventChannel, kind: CmEventType) -> aiordma.verbs.CmEvent:
    while True:
        select.select([channel.fd], [], [], 10)
        for event in channel.events():
            assert event.type is kind, event
            return event


class End:
    """A queue pair that librdmacm did not create, its completion queue, and memory."""

    def __init__(self, identifier: aiordma.verbs.Identifier, stack: ExitStack) -> None:
        context = stack.enter_context(identifier.context())
        domain = stack.enter_context(context.alloc_pd())
        self.identifier = identifier
        self.queue = stack.enter_context(aiordma.verbs.CompletionQueue(context, 8))
        self.pair = stack.enter_context(
            aiordma.verbs.QueuePair.create(
                domain, self.queue, self.queue, capacity=aiordma.verbs.Capacity(4, 4)
            )
        )
        self.region = stack.enter_context(aiordma.MemoryRegion(domain, bytearray(64)))

    @property
    def parameters(self) -> aiordma.verbs.ConnectionParameters:
        return aiordma.verbs.ConnectionParameters(qp_num=self.pair.qp_num)

    def move(self, *states: QueuePairState) -> None:
        for state in states:
            self.pair.modify(**self.identifier.init_qp_attr(state))

    def completion(self) -> aiordma.verbs.WorkCompletion:
        while not (found := self.queue.poll(1)):
            pass
        return found[0]


def connected_by_numbers(address: str, stack: ExitStack) -> None:
    channel = stack.enter_context(aiordma.verbs.EventChannel())
    listener = stack.enter_context(aiordma.verbs.Identifier(channel))
    listener.bind(address, 0)
    listener.listen(backlog=4)
    client = stack.enter_context(aiordma.verbs.Identifier(channel))
    _, port = listener.local_address or ("", 0)
    client.resolve_address(address, port, source=None, timeout_ms=5000)
    expect(channel, CmEventType.ADDR_RESOLVED)
    client.resolve_route(timeout_ms=5000)
    expect(channel, CmEventType.ROUTE_RESOLVED)
    ours = End(client, stack)
    ours.move(QueuePairState.INIT)
    client.set_local_ece(OFFERED)
    client.connect(ours.parameters)

    request = expect(channel, CmEventType.CONNECT_REQUEST)
    server = stack.enter_context(aiordma.verbs.Identifier(channel, key=request.new_key))
    offered = server.remote_ece
    if not offered.options & KNOWN:
        server.reject_ece(b"without these options, please")
        return
    theirs = End(server, stack)
    theirs.move(QueuePairState.INIT, QueuePairState.RTR, QueuePairState.RTS)
    theirs.pair.post_recv(1, [theirs.region])
    server.set_local_ece(aiordma.verbs.Ece(offered.vendor_id, offered.options & KNOWN))
    server.accept(theirs.parameters)

    expect(channel, CmEventType.CONNECT_RESPONSE)
    print("agreed to the options", client.remote_ece.options)
    ours.move(QueuePairState.RTR, QueuePairState.RTS)
    ours.region.view[:5] = b"hello"
    ours.pair.post_send(2, [ours.region[:5]])
    print("received", bytes(theirs.region.view[: theirs.completion().byte_len]))
    # A message has arrived before the last packet of the handshake: report it.
    server.notify(aiordma.verbs.AsyncEventType.COMM_EST)
    expect(channel, CmEventType.ESTABLISHED)
    client.establish()  # the last packet; the server knows by now
    client.disconnect()
    expect(channel, CmEventType.DISCONNECTED)


async def connected_without(device: str, gid_index: int) -> None:
    async with (
        aiordma.open_queue_pair(device, gid_index=gid_index) as one,
        aiordma.open_queue_pair(device, gid_index=gid_index) as other,
    ):
        await one.connect_to(other.address)  # programs send the address, over TCP for instance
        await other.connect_to(one.address)
        await one.send(b"by hand")
        print("received", await other.receive())


def main(address: str) -> None:
    with ExitStack() as stack:
        connected_by_numbers(address, stack)
    with aiordma.verbs.EventChannel() as channel, aiordma.verbs.Identifier(channel) as identifier:
        identifier.bind(address, 0)
        with identifier.context() as context:
            device, table = context.device_name, context.gid_table()
    packed = bytes(10) + b"\xff\xff" + bytes(map(int, address.split(".")))
    index = next(entry.index for entry in reversed(table) if entry.gid == packed)
    asyncio.run(connected_without(device, index))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="IPv4, of this machine's RoCE interface")
    main(parser.parse_args().address)

"""Send to everyone at once: members of a multicast group hear what one sender says.

    python examples/multicast.py --listen --bind 127.0.0.1               # as many as you like
    python examples/multicast.py "hello, all" --bind 127.0.0.1

The sender joins only to send, so that its own words do not come back to it; a member that has heard
them replies to the sender alone. All are datagrams: who is not there in time misses them.
"""

import argparse
import asyncio

import aiordma

GROUP = "239.1.2.3"


async def listen(bind: str, address: str) -> None:
    """Be a member: print what is said, and confirm it to whoever said it."""
    async with aiordma.open_datagram(bind) as socket:
        group = await socket.join(address)
        print(f"listening to {group.address}", flush=True)
        async for message in socket:
            print(f"heard {message.data.decode()!r}", flush=True)
            await socket.send(b"heard you", message.source)


async def speak(text: str, bind: str, address: str, seconds: float) -> None:
    """Say it once, and count who confirms it in the time given."""
    async with aiordma.open_datagram(bind) as socket:
        group = await socket.join(address, send_only=True)
        await socket.send(text.encode(), group)
        members = set()
        try:
            async with asyncio.timeout(seconds):
                async for message in socket:
                    members.add(message.source)
        except TimeoutError:
            pass
        print(f"{len(members)} heard it")
        await group.leave()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="?", help="what to say")
    parser.add_argument("--bind", required=True, help="address of our own RDMA interface")
    parser.add_argument("--group", default=GROUP, help="the group's address")
    parser.add_argument("--seconds", type=float, default=2.0, help="to wait for confirmations")
    parser.add_argument("--listen", action="store_true", help="be a member")
    arguments = parser.parse_args()
    if arguments.listen:
        await listen(arguments.bind, arguments.group)
    elif arguments.text:
        await speak(arguments.text, arguments.bind, arguments.group, arguments.seconds)
    else:
        parser.error("what shall be said? give a text, or --listen")


if __name__ == "__main__":
    asyncio.run(main())

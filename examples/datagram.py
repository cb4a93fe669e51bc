"""Ask a service by datagram: one question, one answer, no connection.

    python examples/datagram.py --serve --bind 127.0.0.1                 # one terminal
    python examples/datagram.py 127.0.0.1 --bind 127.0.0.1                # another

Datagrams can be lost, and nobody is told: whoever asks waits for so long, and asks again. The
number beside each datagram (its immediate data) tells which answer belongs to which question.
"""

import argparse
import asyncio

import aiordma

SECONDS = 1.0
ATTEMPTS = 5


async def serve(bind: str, port: int) -> None:
    """Answer every question with its text in capitals, whoever asks."""
    async with aiordma.open_datagram(bind, port) as socket:
        print(f"listening on {bind}:{socket.port}, queue pair {socket.qp_num:#x}", flush=True)
        async for question in socket:
            answer = question.data.upper()
            try:
                await socket.send(answer, question.source, immediate=question.immediate)
            except aiordma.VerbsCallError as error:  # nobody has the address that the sender gave
                print(f"not answered: {error}")


async def ask(socket: aiordma.Datagram, peer: aiordma.DatagramPeer, number: int, text: str) -> str:
    """Ask until an answer with our number comes."""
    for _ in range(ATTEMPTS):
        await socket.send(text.encode(), peer, immediate=number)
        try:
            async with asyncio.timeout(SECONDS):
                while True:
                    answer = await socket.receive()
                    if answer.immediate == number:
                        return answer.data.decode()
        except TimeoutError:
            print(f"question {number} or its answer was lost: asking again")
    raise SystemExit("nobody answers")


async def use(address: str, bind: str, port: int) -> None:
    async with aiordma.open_datagram(bind) as socket:
        peer = await socket.resolve(address, port)
        print(
            f"the service is queue pair {peer.qp_num:#x}; datagrams carry up to {socket.mtu} bytes"
        )
        for number, text in enumerate(("who", "is", "there")):
            print(f"{text} -> {await ask(socket, peer, number, text)}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", nargs="?", help="of the server's RDMA interface")
    parser.add_argument("--bind", required=True, help="address of our own RDMA interface")
    parser.add_argument("--port", type=int, default=7473)
    parser.add_argument("--serve", action="store_true", help="be the server")
    arguments = parser.parse_args()
    if arguments.serve:
        await serve(arguments.bind, arguments.port)
    elif arguments.address:
        await use(arguments.address, arguments.bind, arguments.port)
    else:
        parser.error("whom to ask? give the server's address, or --serve")


if __name__ == "__main__":
    asyncio.run(main())

"""TLS over RDMA by asyncio's streams: python examples/stream_tls.py 192.0.2.1 cert.pem privkey.pem
openssl req -x509 -nodes -newkey ed25519 -subj / -addext subjectAltName=IP:192.0.2.1 -out cert.pem
"""

import asyncio
import ssl
import sys

from aiordma.streams import open_connection, start_server


async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write((await reader.readline()).upper())
    writer.close()


async def main(host: str, cert: str, key: str) -> None:
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=cert)
    ours.load_cert_chain(cert, key)
    async with await start_server(shout, host, 0, ssl=ours) as server:
        reader, writer = await open_connection(*server.sockets[0].getsockname(), ssl=theirs)
        writer.write(b"hello\n")
        print(writer.get_extra_info("cipher")[1], await reader.read())
        writer.close()
        await writer.wait_closed()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

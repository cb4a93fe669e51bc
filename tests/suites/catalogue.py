"""The suites, and why some of their tests do not apply."""

from dataclasses import dataclass, field

from tests.suites.common import reason

__all__ = ("DEPARTURES", "SUITES", "Suite")


@dataclass(frozen=True)
class Suite:
    """Tests of another project.

    Attributes:
        source: where the tests come from: "apt" (the interpreter's own) or a project of PyPI, whose
            source distribution has them.
        repository, revision: the commit that has the tests, if the source distribution has none.
            Its folder of the project's name gets the files of the installed project, so that these
            are tested.
        page: the page of docs/ with the results.
        plugin: substitutes what is tested.
        arguments: what pytest is given: files, modules and options.
        packages: what the tests import besides the project itself.
        gateway: whether blocking sockets of the tests are peers (see in_suite/gateway.py).
        reasons: for a pattern of test names, why it fails on our loop, or on both.
    """

    name: str
    source: str
    arguments: tuple[str, ...]
    packages: tuple[str, ...] = ()
    repository: str = ""
    revision: str = ""
    page: str = "streams-suites"
    plugin: str = "in_suite.plugin"
    gateway: bool = True
    reasons: dict[str, str] = field(default_factory=dict)

    def reason(self, test: str) -> str | None:
        """Why this test does not apply, or None."""
        return reason(self.reasons, test)


PEER = "compares the peer's address with a socket's; the gateway stands between"
CLOSING = "connects at once: the device closes a port in a worker thread"
AT_ONCE = "writes in the instant in which the peer closes, and expects that the write is accepted"
CONFIRMED = (
    "expects connection_lost in the loop's next turn after a close; it comes when the peer's "
    "device has confirmed everything, which can take longer"
)
LATER = (
    "two requests at once to a server that ends within 100 ms of the first one: opening a stream "
    "takes milliseconds, so that the server can end before it has the second request"
)
SOCKET = "uses the transport's socket; a stream has what only stands for one"
ABORTED = "the peer of an abort sees an error, where TCP shows an orderly end"
WORDS = "expects other words in an error of the same class"
LOOKUP = "replaces the loop's getaddrinfo by a mock"
PRIVATE = "looks at private attributes of asyncio.Server"
REUSED = "skips itself unless a new connection has the descriptor of the one that was closed"
REUSE = "needs SO_REUSEPORT, which librdmacm does not have"
NEWER = "fails on both: reads attributes that the installed version of websockets does not have"
DEPARTURES = frozenset({ABORTED, AT_ONCE, CLOSING, CONFIRMED, LATER, REUSE})
"""Reasons by which a stream behaves otherwise than a TCP socket. The other tests do not apply."""

TORNADO = "replaces a method of the Tornado stream in a TCP comm; ours has none"
OWN_MEMORY = (
    "expects the TCP comm's layout, where small frames share a buffer; here each has its own memory"
)
IPV4 = "connects by IPv6 to a listener without a host, which is every IPv4 address of ours"
HELPER = "a helper of the suite fails on both: list.extend() with two arguments"
RETURNED = "expects that the peer's write has returned once its message is read; ours may not have"
THREADS = "expects at most two threads while it connects; aiordma's calls into the driver have more"

DISTRIBUTED: dict[str, str] = {
    "*test_comm_closed_on_write_error*": TORNADO,
    "*test_stop_listener_during_handle_stream*": TORNADO,
    "*test_share_buffer_with_header*": OWN_MEMORY,
    "*test_comm_failure_threading*": THREADS,
    "*test_remote_access": IPV4,
    "*test_local_tls*": HELPER,
    "*test_server_listen": IPV4,
    "*test_server_comms_mark_active_handlers": RETURNED,
}

ASYNCIO = "test.test_asyncio."

SUITES: tuple[Suite, ...] = (
    Suite(
        "CPython test_asyncio",
        "apt",
        (
            "--pyargs",
            *(
                ASYNCIO + each
                for each in (
                    "test_streams",
                    "test_server",
                    "test_buffered_proto",
                    "test_sslproto",
                    "test_ssl",
                )
            ),
        ),
        reasons={
            "*test_async_writer_api_exception_after_close": CONFIRMED,
            "*test_start_server_1": PRIVATE,
        },
    ),
    Suite(
        "CPython test_asyncio.test_events",
        "apt",
        ("--pyargs", ASYNCIO + "test_events", "-k", "SelectEventLoopTests"),
        reasons={
            "*test_create_connection_local_addr_in_use": WORDS,
            "*test_create_server_multiple_hosts_ipv*": LOOKUP,
            "*test_create_server_reuse_port": SOCKET,
            "*test_create_ssl_connection": PEER,
            "*test_server_close": CLOSING,
        },
    ),
    Suite(
        "CPython test_asyncio.test_sendfile",
        "apt",
        ("--pyargs", ASYNCIO + "test_sendfile", "-k", "SelectEventLoopTests"),
    ),
    Suite(
        "uvloop test_tcp",
        "uvloop",
        ("tests/test_tcp.py", "-k", "AIO"),
        packages=("pyOpenSSL",),
        reasons={
            "*test_create_server_4": WORDS,
            "*test_create_server_6": REUSE,
            "*test_create_connection_sock_cancel_fd_leak": REUSED,
        },
    ),
    Suite(
        "aiohttp WebSocket",
        "aiohttp",
        (
            "tests/test_web_websocket_functional.py",
            "tests/test_client_ws_functional.py",
            "-pno:asyncio",
            "-paiohttp.pytest_plugin",
        ),
        packages=("pytest-mock",),
        reasons={
            "*test_abnormal_closure_when_server_does_not_receive*": AT_ONCE,
        },
    ),
    Suite(
        "aiohttp HTTP",
        "aiohttp",
        (
            "tests/test_web_functional.py",
            "tests/test_web_server.py",
            "tests/test_web_sendfile_functional.py",
            "tests/test_client_functional.py",
            "-pno:asyncio",
            "-paiohttp.pytest_plugin",
        ),
        packages=("pytest-mock",),
        reasons={"*test_tcp_connector_fingerprint_fail*": SOCKET},
    ),
    *(
        Suite(
            f"distributed {file}",
            "distributed",
            (f"distributed/{folder}/{file}.py", "-pno:asyncio", "-pno:anyio"),
            repository="https://github.com/dask/distributed",
            revision="40fcd99a8cd41c39071a16a546e93a9298f1b64d",  # between 2026.7.1 and 2026.8.0
            page="dask",
            plugin="in_suite.dask",
            gateway=False,
            reasons=DISTRIBUTED,
        )
        for folder, file in (
            ("comm/tests", "test_comms"),
            ("tests", "test_core"),
            ("tests", "test_batched"),
            ("tests", "test_failed_workers"),
            ("deploy/tests", "test_local"),
            ("tests", "test_client"),
        )
    ),
    Suite(
        "uvicorn",
        "uvicorn",
        (
            "tests/test_server.py",
            "tests/test_main.py",
            "tests/test_default_headers.py",
            "tests/test_ssl.py",
            "tests/protocols/test_http.py",
            "tests/protocols/test_http2.py",
            "tests/protocols/test_websocket.py",
            "-panyio",
        ),
        packages=(
            "wsproto",
            "trustme",
            "pytest-mock",
            "httpx2",
            "httpcore2",
            "truststore",
            "httptools",
        ),
        reasons={
            "*test_request_than_limit_max_requests_warn_log*": LATER,
            "*test_limit_max_requests_jitter*": LATER,
        },
    ),
    *(
        Suite(
            f"valkey-py {file}",
            "valkey",
            (
                f"tests/test_asyncio/{file}.py",
                "--asyncio-mode=auto",
                "-m",
                "not onlycluster and not valkeymod and not replica",
                "-pno:valkey",
            ),
            packages=("ujson",),
            page="valkey",
            plugin="in_suite.valkey_client",
            gateway=False,
        )
        for file in (
            "test_commands",
            "test_connection",
            "test_connection_pool",
            "test_pubsub",
            "test_pipeline",
            "test_lock",
            "test_monitor",
            "test_scripting",
            "test_encoding",
            "test_retry",
        )
    ),
    Suite(
        "httpx",
        "httpx",
        (
            "tests/client/test_async_client.py",
            "tests/test_timeouts.py",
            "-k",
            "not trio and not uvloop",
            "-pno:asyncio",
        ),
        repository="https://github.com/encode/httpx",
        revision="26d48e0634e6ee9cdc0533996db289ce4b430177",  # 0.28.1
        packages=("trustme",),
        gateway=False,
    ),
    Suite(
        "websockets",
        "websockets",
        (
            "tests/asyncio/test_client.py",
            "tests/asyncio/test_connection.py",
            "tests/asyncio/test_server.py",
            "tests/legacy/test_client_server.py",
            "tests/legacy/test_protocol.py",
        ),
        repository="https://github.com/python-websockets/websockets",
        revision="04e599ca3caad2c5bb3fa8eaf24066fd270e90a7",  # after 17.0.1
        reasons={
            "*ServerTests::test_timeout_before_handshake_request": ABORTED,
            "*SecureServerTests::test_timeout_during_tls_handshake": ABORTED,
            "*ServerTests::test_close_stops_accepting_connections": CLOSING,
            "*ConnectionTests::test_keepalive_terminates_while_*": NEWER,
            "*::test_keepalive_ping_not_acknowledged_closes_connection": NEWER,
            "*::test_keepalive_ping_stops_when_connection_clos*": NEWER,
        },
    ),
    Suite(
        "grpclib",
        "grpclib",
        ("tests",),
        repository="https://github.com/vmagamedov/grpclib",
        revision="0d27158f98aa939493009e6844576d81ec7d8254",  # 0.4.9
        packages=("protobuf", "googleapis-common-protos", "faker"),
    ),
)

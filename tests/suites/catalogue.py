"""The suites, and why some of their tests do not apply."""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

__all__ = ("SUITES", "Suite")


@dataclass(frozen=True)
class Suite:
    """Tests of another project.

    Attributes:
        source: where the tests come from: "apt" (the interpreter's own) or a project of PyPI, whose
            source distribution has them.
        arguments: what pytest is given: files, modules and options.
        packages: what the tests import besides the project itself.
        gateway: whether blocking sockets of the tests are peers (see in_suite/gateway.py).
        is_quick: whether `--quick` runs it.
        reasons: for a pattern of test names, why it fails on our loop.
    """

    name: str
    source: str
    arguments: tuple[str, ...]
    packages: tuple[str, ...] = ()
    gateway: bool = True
    is_quick: bool = True
    reasons: dict[str, str] = field(default_factory=dict)

    def reason(self, test: str) -> str | None:
        """Why this test does not apply, or None."""
        return next((why for each, why in self.reasons.items() if fnmatchcase(test, each)), None)


PEER = "compares the peer's address with a socket's; the gateway stands between"
GATEWAY = "connects at once: the device closes a port in a worker thread"
AT_ONCE = "writes in the instant in which the peer closes, and expects that the write is accepted"
SOCKET = "uses the transport's socket; a stream has none"
ABORTED = "the peer of an abort sees an error, where TCP shows an orderly end"
WORDS = "expects other words in an error of the same class"
LOOKUP = "replaces the loop's getaddrinfo by a mock"
PRIVATE = "looks at private attributes of asyncio.Server"
REUSE = "needs SO_REUSEPORT, which librdmacm does not have"

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
            "*test_start_server_1": PRIVATE,
            "*TestSSL::test_ssl_handshake_timeout": ABORTED,
            "*SelectorStartTLSTests::test_handshake_timeout": ABORTED,
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
            "*test_server_close": GATEWAY,
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
            "*test_create_connection_sock_cancel_fd_leak": SOCKET,
            "*test_create_server_4": WORDS,
            "*test_create_server_6": REUSE,
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
        is_quick=False,
        reasons={
            "*test_send_recv_text*": SOCKET,
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
        is_quick=False,
        reasons={"*test_tcp_connector_fingerprint_fail*": SOCKET},
    ),
)

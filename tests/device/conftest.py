"""Tests against a device; the fixtures apply here because they are imported here."""

import ssl

import pytest
import trustme

from tests.devices import (
    ADDRESS,
    DeviceUnderTest,
    device,
    kernel_objects,
    nothing_is_left,
    required_capabilities,
)

__all__ = (
    "ADDRESS",
    "DeviceUnderTest",
    "device",
    "kernel_objects",
    "nothing_is_left",
    "required_capabilities",
)


@pytest.fixture(scope="module")
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The server's context and the client's, with a certificate made for these tests."""
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(ADDRESS).configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return server, client

"""A method whose plain calls need no Python looks like one that does."""

import inspect
import pydoc

from aiordma import Connection
from aiordma._native import IN_C


def test_a_method_that_needs_no_python_is_documented_as_one_that_does() -> None:
    method = Connection.post_write
    assert method.__name__ == "post_write"
    assert "WRITE" in (method.__doc__ or "")
    assert list(inspect.signature(method).parameters)[:3] == ["self", "local", "remote"]
    assert inspect.isroutine(method)
    assert "post_write(self, local" in (text := pydoc.plain(pydoc.render_doc(method)))
    assert "RDMA WRITE" in text
    assert method.__module__ == "aiordma.posting"
    assert inspect.unwrap(method) is not method or not IN_C
    assert "post_write" in repr(method)

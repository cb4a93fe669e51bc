"""A method whose plain calls need no Python looks like one that does."""

import inspect
import pydoc

from aiordma import Connection


def test_a_method_that_needs_no_python_is_documented_as_one_that_does() -> None:
    method = Connection.post_write
    assert method.__name__ == "post_write"
    assert "WRITE" in (method.__doc__ or "")
    assert list(inspect.signature(method).parameters)[:3] == ["self", "local", "remote"]
    assert inspect.isroutine(method)
    text = " ".join(pydoc.plain(pydoc.render_doc(method)).split())  # Python 3.13 breaks the line
    assert "post_write(self, local" in text.replace("( ", "(")
    assert "RDMA WRITE" in text
    assert method.__module__ == "aiordma._connection.posting"
    assert inspect.unwrap(method) is not method
    assert "post_write" in repr(method)

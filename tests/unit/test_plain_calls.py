"""A method whose plain calls need no Python looks like one that does."""

import inspect
import os
import pydoc
import subprocess
import sys

from aiordma import Connection
from aiordma._requests.select import BACKEND
from tests.unit.sources import ROOT


def test_a_method_that_needs_no_python_is_documented_as_one_that_does() -> None:
    method = Connection.post_write
    assert method.__name__ == "post_write"
    assert "WRITE" in (method.__doc__ or "")
    assert list(inspect.signature(method).parameters)[:3] == ["self", "local", "remote"]
    assert inspect.isroutine(method)
    text = " ".join(pydoc.plain(pydoc.render_doc(method)).split())  # Python 3.13 breaks the line
    assert "post_write(self, local" in text.replace("( ", "(")
    assert "RDMA WRITE" in text
    assert method.__module__ == "aiordma._connection.connection"
    assert inspect.unwrap(method) is not method or BACKEND == "python"
    assert "post_write" in repr(method)


SIGNATURES = """
import inspect
import aiordma

def shown(method, skipped):
    parameters = list(inspect.signature(method).parameters.values())[skipped:]
    return [f"{each.name}={each.default} {each.kind.description}" for each in parameters]

print("WorkRequest", shown(aiordma.WorkRequest, 0))
for kind in (aiordma.Connection, aiordma.SharedReceiveQueue, aiordma.WorkRequest):
    for name in dir(kind):
        if not name.startswith("_") and callable(method := getattr(kind, name)):
            print(kind.__name__, name, shown(method, 1))
"""


def test_methods_in_c_have_their_references_signatures() -> None:
    def signatures(engine: str) -> list[str]:
        environment = {**os.environ, "AIORDMA_BACKEND": engine}
        command = [sys.executable, "-c", SIGNATURES]
        shown = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
        return shown.splitlines()

    typed = signatures("python")
    assert any(line.startswith("Connection post_write") and "fence=False" in line for line in typed)
    assert signatures("c") == typed

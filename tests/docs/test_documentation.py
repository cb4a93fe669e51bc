"""Every program in the documentation runs, and prints what the page says; every example runs."""

import pytest

from aiordma._base.provider import SOFTWARE
from tests.devices import ADDRESS, DEVICE, own_group
from tests.docs.programs import PAGES, PORT, ROLES, ROOT, Block, blocks, run, serving

ALL = [block for page in PAGES for block in blocks(page)]
SECONDS = "1" if DEVICE == SOFTWARE else "2"
AT_PORT = ("--port", str(PORT))
ELSEWHERE = {
    "ninep.py": "tests/interop/test_kernel_9p.py",
    "rping.py": "tests/interop/test_rping_command.py",
}


def test_every_block_of_python_says_what_it_is() -> None:
    assert ALL
    assert [str(block) for block in ALL if block.role not in ROLES] == []


@pytest.mark.parametrize("block", [b for b in ALL if b.role != "server"], ids=str)
def test_a_program_prints_what_its_page_says(block: Block) -> None:
    if block.role == "alone":
        done = run("-c", block.source)
    else:
        assert block.server is not None, "a client needs a server above it"
        with serving("-c", block.server.source):
            done = run("-c", block.source)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == block.output


def test_the_first_program_of_the_readme_serves_the_example_client() -> None:
    (block,) = [b for b in ALL if b.page == "README.md"]
    # It prints nothing; say when it listens, as the examples do.
    source = block.source.replace("as listener:\n", "as listener:\n        print('listening')\n")
    with serving("-u", "-c", source):
        done = run("examples/echo_client.py", ADDRESS, "--count", "2", *AT_PORT)
    assert done.returncode == 0, done.stderr
    assert "received b'hello 1 over RDMA'" in done.stdout


def test_the_echo_examples_understand_each_other() -> None:
    with serving("examples/echo_server.py", "--bind", ADDRESS, *AT_PORT):
        done = run("examples/echo_client.py", ADDRESS, *AT_PORT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("received b'hello") == 5


def test_the_one_sided_example_reads_and_writes() -> None:
    with serving("examples/one_sided.py", "--serve", ADDRESS, *AT_PORT):
        done = run("examples/one_sided.py", ADDRESS, *AT_PORT)
    assert done.returncode == 0, done.stderr
    assert "16 pipelined READs brought 4096 bytes" in done.stdout


@pytest.mark.capability("rnr")
def test_shared_receive_example_serves_every_client() -> None:
    done = run("examples/shared_receive.py", ADDRESS)
    assert done.returncode == 0, done.stderr
    for number in range(4):
        assert f"25 messages of client {number}" in done.stdout


@pytest.mark.capability("datagrams")
def test_the_datagram_example_asks_and_answers() -> None:
    with serving("examples/datagram.py", "--serve", "--bind", ADDRESS, *AT_PORT):
        done = run("examples/datagram.py", ADDRESS, "--bind", ADDRESS, *AT_PORT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("who -> WHO\nis -> IS\nthere -> THERE\n")


@pytest.mark.capability("datagrams")
def test_the_multicast_example_reaches_every_member() -> None:
    where = ("--bind", ADDRESS, "--group", own_group(1))
    listen = ("examples/multicast.py", "--listen", *where)
    with serving(*listen), serving(*listen):
        done = run("examples/multicast.py", "hello, all", *where, "--seconds", SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 heard it\n"


@pytest.mark.capability("atomics")
def test_the_atomics_example_counts_each_ticket_once() -> None:
    done = run("examples/atomics.py", ADDRESS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "32 tickets, each once: True\nadded up under the lock: True\n"


@pytest.mark.capability("immediate")
def test_immediate_example_reports_each_slot() -> None:
    done = run("examples/immediate.py", ADDRESS)
    assert done.returncode == 0, done.stderr
    for slot in range(8):
        assert f"slot {slot}: b'written into slot {slot}'" in done.stdout
    assert done.stdout.endswith("told to stop: b'that was all'\n")


@pytest.mark.capability("memory_windows")
def test_the_memory_window_example_lends_and_takes_back() -> None:
    done = run("examples/memory_window.py", ADDRESS)
    assert done.returncode == 0, done.stderr
    for line in range(3):
        assert f"line {line}: b'borrowed for line {line}'" in done.stdout
    assert done.stdout.endswith("what was taken back is refused\n")


def test_no_example_goes_without_a_test() -> None:
    here = (ROOT / "tests/docs/test_documentation.py").read_text()
    for example in (ROOT / "examples").glob("*.py"):
        page = ELSEWHERE.get(example.name)
        assert example.name in ((ROOT / page).read_text() if page else here)


def test_the_web_server_example_answers_its_client() -> None:
    done = run("examples/stream_http.py", ADDRESS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hello from /rdma\n"

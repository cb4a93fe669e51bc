"""Every program in the documentation runs, and prints what the page says; every example runs."""

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.devices import ADDRESS, DEVICE, own_group
from tests.docs.programs import (
    PAGES,
    PORT,
    ROLES,
    ROOT,
    Block,
    blocks,
    complaints,
    ours,
    printed,
    run,
    serving,
)
from tests.internals import SOFTWARE
from tests.ports import free_port

pytestmark = pytest.mark.slow

ALL = [block for page in PAGES for block in blocks(page)]
BY_ITSELF = "aiordma.testing.connected_pair("
"""A program with this uses the software device, whatever device the tests are for."""
OF_DASK = "dask.distributed"
"""A program with this takes the VM too long."""
OF_VALKEY = "aiordma.integrations.valkey"
"""A program with this needs a Valkey server."""
SIMULATED = "simulate"
"""A program with this has hosts of its own."""
NATIVELY = (BY_ITSELF, OF_DASK, OF_VALKEY, SIMULATED)
HERE = [
    block
    for block in ALL
    if DEVICE == SOFTWARE or not any(each in block.source for each in NATIVELY)
]
PRINTING = [b for b in HERE if b.role in ("client", "alone") and b.page != "README.md"]
SECONDS = "1" if DEVICE == SOFTWARE else "2"
AT_PORT = ("--port", str(PORT))
ELSEWHERE = {
    "ninep.py": "tests/interop/test_kernel_9p.py",
}


def test_every_block_of_python_says_what_it_is() -> None:
    assert ALL
    assert [str(block) for block in ALL if block.role not in ROLES] == []


def test_every_conftest_belongs_to_a_test() -> None:
    conftests = [block for block in ALL if block.role == "conftest"]
    assert {block.source for block in conftests} == {block.conftest for block in ALL} - {""}


@pytest.mark.parametrize("block", PRINTING, ids=str)
def test_a_program_prints_what_its_page_says(block: Block) -> None:
    if OF_VALKEY in block.source:
        with serving("-m", "tests.valkey.server", str(PORT)):
            done = run("-c", block.source.replace("6379", str(PORT)))
    elif block.role == "alone":
        done = run("-c", block.source)
    else:
        assert block.server is not None, "a client needs a server above it"
        with serving("-c", block.server.source):
            done = run("-c", block.source)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == block.output


@pytest.mark.parametrize("block", [b for b in ALL if b.role == "test"], ids=str)
def test_a_test_in_a_page_passes_in_a_project_of_its_own(block: Block, tmp_path: Path) -> None:
    if DEVICE != SOFTWARE and ("rdma_faults" in block.source or "Faults()" in block.source):
        pytest.skip("needs fault injection: the software device has it")
    (tmp_path / "test_page.py").write_text(block.source)
    (tmp_path / "conftest.py").write_text(block.conftest)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    where = (f"--rdma={DEVICE}", f"--rdma-address={ADDRESS}")
    done = run("-m", "pytest", "-q", "-k", "not trio", *where, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_first_programs_of_the_readme_understand_each_other_and_the_example() -> None:
    server, client = [b for b in ALL if b.page == "README.md"]
    with serving("-u", "-c", server.source):
        output = printed("examples/echo_client.py", ADDRESS, "--count", "2", *AT_PORT)
        assert "received b'hello 1 over RDMA'" in output
        output = printed("-c", client.source)
        assert output == f"b'hello over RDMA' through {DEVICE}\n"


def test_the_echo_examples_understand_each_other() -> None:
    with serving("examples/echo_server.py", "--bind", ADDRESS, *AT_PORT):
        output = printed("examples/echo_client.py", ADDRESS, *AT_PORT)
    assert output.count("received b'hello") == 5


def test_the_one_sided_example_reads_and_writes() -> None:
    with serving("examples/one_sided.py", "--serve", ADDRESS, *AT_PORT):
        output = printed("examples/one_sided.py", ADDRESS, *AT_PORT)
    assert "16 pipelined READs brought 4096 bytes" in output


def test_the_lending_example_serves_eight_clients_from_one_region() -> None:
    with serving("examples/lending_library.py", "--serve", ADDRESS, "--mib", "4", *AT_PORT):
        output = printed("examples/lending_library.py", ADDRESS, *AT_PORT)
    assert output.count("read 128 of the pages") == 8


def test_parameter_server_lends_one_version_at_a_time() -> None:
    with serving("examples/parameter_server.py", "--serve", ADDRESS, *AT_PORT):
        output = printed("examples/parameter_server.py", ADDRESS, *AT_PORT)
    assert output == "10 leases, each of one version\n"


def test_key_value_example_reads_the_blocks_of_its_keys() -> None:
    with serving("examples/kv_blocks.py", "--serve", ADDRESS, *AT_PORT):
        output = printed("examples/kv_blocks.py", ADDRESS, *AT_PORT)
    found = re.fullmatch(r"(\d+) of 1000 keys were there, each with its value\n", output)
    assert found
    assert 100 < int(found[1]) < 1000


@pytest.mark.capability("immediate")
def test_handover_survives_the_crash_of_prefill() -> None:
    blocks = 10_000 if DEVICE == SOFTWARE else 500
    done = run("examples/kv_handover.py", ADDRESS, "--blocks", str(blocks))
    first, second = done.stdout.splitlines()
    assert first.startswith("prefill is gone: ")
    assert second == f"{blocks} of {blocks} blocks are right"


def test_version_example_finds_whole_versions() -> None:
    # A READ that takes longer than the owner rests never finds a whole version: on a slow machine,
    # and in the virtual one, it takes long.
    output = printed("examples/read_versions.py", ADDRESS, "--mib", "1", "--rest", "0.2")
    assert output.startswith("20 READs returned one version each\n")


def test_rpc_example_answers_in_time_and_exports_its_metrics() -> None:
    metrics = str(free_port())
    serve = ("examples/rpc_server.py", "--bind", ADDRESS, *AT_PORT, "--metrics", metrics)
    with serving(*serve) as server:
        output = printed("examples/rpc_client.py", ADDRESS, *AT_PORT)
        assert output == "double 21: 42; sleep 60: time limit\n10 answers, 1 connections\n"
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=30) as page:
            exported = page.read().decode()
        server.terminate()
        rest, _ = server.communicate(timeout=30)
    assert 'rpc_call_seconds_count{method="sleep",outcome="error"} 1.0' in exported
    assert f'aiordma_bytes_sent_total{{device="{DEVICE}"}}' in exported
    assert server.returncode == 0, rest
    logged = [json.loads(line) for line in complaints(rest) if line.startswith("{")]
    assert [each["call"] for each in logged if each["message"] == "time limit"] == ["sleep"]
    # Without the slow callbacks that asyncio's debug mode reports on a busy machine.
    said = [each["message"] for each in logged if not each["message"].startswith("Executing <")]
    assert said[-1] == "drained"


@pytest.mark.natively
def test_rpc_client_moves_from_a_draining_server_to_the_next() -> None:
    serve = ("examples/rpc_server.py", "--bind", ADDRESS, *AT_PORT)
    calls = ("--calls", "120", "--sleep", "0.2")
    client = [sys.executable, "examples/rpc_client.py", ADDRESS, *AT_PORT, *calls]
    with (
        serving(*serve) as server,
        subprocess.Popen(client, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running,
    ):
        assert server.stdout is not None
        while "time limit" not in server.stdout.readline():
            pass  # the client has been served for a second
        server.terminate()
        rest, _ = server.communicate(timeout=30)
        with serving(*serve):
            answered, _ = running.communicate(timeout=60)
    assert server.returncode == 0, rest
    assert answered.endswith("120 answers, 2 connections\n")


@pytest.mark.capability("rnr")
def test_shared_receive_example_serves_every_client() -> None:
    output = printed("examples/shared_receive.py", ADDRESS)
    for number in range(4):
        assert f"25 messages of client {number}" in output


@pytest.mark.capability("datagrams")
def test_the_datagram_example_asks_and_answers() -> None:
    with serving("examples/datagram.py", "--serve", "--bind", ADDRESS, *AT_PORT):
        output = printed("examples/datagram.py", ADDRESS, "--bind", ADDRESS, *AT_PORT)
    assert output.endswith("who -> WHO\nis -> IS\nthere -> THERE\n")


@pytest.mark.capability("datagrams")
def test_the_multicast_example_reaches_every_member() -> None:
    where = ("--bind", ADDRESS, "--group", own_group(1))
    listen = ("examples/multicast.py", "--listen", *where)
    with serving(*listen), serving(*listen):
        output = printed("examples/multicast.py", "hello, all", *where, "--seconds", SECONDS)
    assert output == "2 heard it\n"


@pytest.mark.capability("atomics")
def test_the_atomics_example_counts_each_ticket_once() -> None:
    output = printed("examples/atomics.py", ADDRESS)
    assert output == "32 tickets, each once: True\nadded up under the lock: True\n"


@pytest.mark.capability("immediate")
def test_immediate_example_reports_each_slot() -> None:
    output = printed("examples/immediate.py", ADDRESS)
    for slot in range(8):
        assert f"slot {slot}: b'written into slot {slot}'" in output
    assert output.endswith("told to stop: b'that was all'\n")


@pytest.mark.capability("memory_windows")
def test_the_memory_window_example_lends_and_takes_back() -> None:
    output = printed("examples/memory_window.py", ADDRESS)
    for line in range(3):
        assert f"line {line}: b'borrowed for line {line}'" in output
    assert output.endswith("what was taken back is refused\n")


@pytest.mark.natively
def test_the_simulated_lease_is_held_twice_and_mended() -> None:
    output = printed("examples/simulated_lease.py")
    first, *trace, last = output.splitlines()
    assert first.startswith("careful=False: seed ")
    assert first.endswith(" hold the lease")
    assert len(trace) > 10
    assert last == "careful=True: 200 seeds found nothing"


@pytest.mark.natively
def test_the_simulated_ring_draws_a_dot_for_each_step() -> None:
    output = printed("examples/simulated_ring.py", "40", "5")
    assert output.count("<circle ") == 200
    assert output.endswith("</svg>\n")


@pytest.mark.capability("ece")
@pytest.mark.capability("rdma_establish")
def test_example_makes_its_own_queue_pairs() -> None:
    output = printed("examples/own_queue_pair.py", ADDRESS)
    assert output.splitlines() == [
        "agreed to the options 1",
        "received b'hello'",
        "received b'by hand'",
    ]


STREAM_EXAMPLES = sorted((ROOT / "examples").glob("stream_*.py"))


@pytest.mark.parametrize("example", STREAM_EXAMPLES, ids=[e.name for e in STREAM_EXAMPLES])
def test_example_of_other_software_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 30


def test_no_example_goes_without_a_test() -> None:
    here = (ROOT / "tests/docs/test_documentation.py").read_text()
    for example in (ROOT / "examples").glob("*.py"):
        page = ELSEWHERE.get(example.name)
        assert example.name in ((ROOT / page).read_text() if page else here)


def command_of(example: str, program: str) -> list[str]:
    """Return the arguments with which an example's docstring starts another program."""
    text = (ROOT / example).read_text()
    command: str
    (command,) = re.findall(rf"^{program} (.*)$", text, re.MULTILINE)
    return command.replace("192.0.2.1", ADDRESS).split()


@pytest.mark.parametrize(
    ("example", "url", "said"),
    [
        ("examples/stream_http.py", "http://{}/rdma", "hello from /rdma\n"),
        ("examples/stream_websocket.py", "ws://{}", "HELLO\n"),
    ],
)
def test_examples_on_uvicorn_answer_their_clients(example: str, url: str, said: str) -> None:
    with serving("-m", "uvicorn", *command_of(example, "uvicorn"), *AT_PORT):
        output = printed(example, url.format(f"{ADDRESS}:{PORT}"))
    assert output == said


def test_tls_example_encrypts_and_answers(tmp_path: Path) -> None:
    example = "examples/stream_tls.py"
    subprocess.run(["openssl", *command_of(example, "openssl")], cwd=tmp_path, check=True)
    output = printed(example, ADDRESS, str(tmp_path / "cert.pem"), str(tmp_path / "privkey.pem"))
    assert output == "TLSv1.3 b'HELLO\\n'\n"


@pytest.mark.natively
def test_dask_example_moves_an_array() -> None:
    done = run("examples/dask_cluster.py", ADDRESS)
    assert done.stdout.splitlines() == ["rdma", "16 MiB"], done.stderr


@pytest.mark.natively
def test_valkey_example_counts_stores_and_publishes() -> None:
    with serving("-m", "tests.valkey.server", str(PORT)):
        done = run("examples/valkey_cache.py", ADDRESS, str(PORT))
    assert done.stdout.splitlines() == ["10 visits", "1048576 bytes", "hello"], done.stderr


COMMAND_LINE = ("-c", "from aiordma.cli.main import main; main()")


def _commands_of_the_page() -> list[list[str]]:
    page = ours((ROOT / "docs/command-line.md").read_text())
    found = re.findall(r"^```console\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [line.removeprefix("$ aiordma ").split() for each in found for line in each.splitlines()]


# The commands that have two sides, each with its server.
SERVERS = {"ping": ["ping", "--serve", "-P"], "cp": ["cp", "--serve", "incoming"]}


@pytest.mark.natively  # in the VM, tests/interop runs each command beside its C counterpart
@pytest.mark.parametrize("words", _commands_of_the_page(), ids=" ".join)
def test_command_of_the_page_runs(words: list[str], tmp_path: Path) -> None:
    if words[0] == "exec" and shutil.which(words[1]) is None:
        pytest.skip(f"this machine has no {words[1]}: apt-get install ibverbs-utils")
    server = SERVERS.get(words[0])
    if server is None:
        done = run(*COMMAND_LINE, *words)
    else:
        (tmp_path / "incoming").mkdir()
        (tmp_path / "data.bin").write_bytes(bytes(1000))
        bind = "-a" if words[0] == "ping" else "--bind"
        serve = (*COMMAND_LINE, *server, bind, ADDRESS, "-p", str(PORT))
        with serving(*serve, folder=tmp_path):
            if words == server:
                return  # it listens
            done = run(*COMMAND_LINE, *words, "-p", str(PORT), folder=tmp_path)
    assert "Traceback" not in done.stderr
    assert done.stdout
    permitted = (0, 1) if words[0] == "doctor" else (0,)  # 1: this machine has no RDMA device
    assert done.returncode in permitted, done.stderr
    if words[0] == "cp":
        name = words[-1].partition(":")[2] or "data.bin"
        assert (tmp_path / "incoming" / name).stat().st_size == 1000


def test_each_server_is_on_the_page() -> None:
    assert [words for words in SERVERS.values() if words not in _commands_of_the_page()] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stream_asyncio.py", ADDRESS), "b'HELLO\\n'\n"),
        (("stream_aiohttp.py", ADDRESS), "hello from /rdma\n"),
        (("stream_grpc.py", ADDRESS, str(PORT)), "status: SERVING\n\n"),
    ],
    ids=["asyncio", "aiohttp", "grpc"],
)
def test_stream_examples_answer_their_clients(words: tuple[str, ...], said: str) -> None:
    output = printed(f"examples/{words[0]}", *words[1:])
    assert output == said

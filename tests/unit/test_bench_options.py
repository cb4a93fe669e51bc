"""perftest's options of `aiordma bench` that cannot apply are refused before measuring."""

import pytest
from typer.testing import CliRunner

from aiordma.bench import Conditions, Workload
from aiordma.cli.bench import bench

REFUSED = {
    "-x 1 -o echo": "the GID of the local address",
    "-S 3 -o write": "the type of service with -T",
    "-T 3 -o datagrams": "use -S",
    "-b -o write": "completes on one side only",
    "-b -o echo": "in both directions already",
    "-n 2 -d 16": "16 operations in flight",
    "-q 0": "-q 0 is not in 1..1024",
    "-T 256": "-T 256 is not in 0..255",
    "-I -1": "-I -1 is not in 0..",
    "-I 32 -o read": "a READ sends no data",
}


@pytest.mark.parametrize("words", REFUSED)
def test_option_that_cannot_apply_says_why(words: str) -> None:
    done = CliRunner().invoke(bench, ["client", "192.0.2.1", *words.split()])
    assert done.exit_code == 2, done.output
    assert REFUSED[words] in " ".join(done.stderr.split())


def test_conditions_that_apply_are_taken() -> None:
    datagrams, echo = Workload("datagrams", 64, 4), Workload("echo", 64, 4)
    Conditions(4, 1024, None, 255, 15).check([datagrams])
    Conditions(4, 1, 255).check([echo])
    with pytest.raises(ValueError, match="-x: echo"):
        Conditions(gid_index=1).check([datagrams, echo])

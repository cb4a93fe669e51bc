"""What the Makefile's test targets run: pytest natively, or a command in the VM."""

import os
import shlex
from typing import NoReturn

import pytest

from tests import tasks
from tests.unit.sources import ROOT
from tests.vm import machine
from tests.vm.report import TestBedError


class Started(Exception):
    """The command that a target runs."""


@pytest.fixture(autouse=True)
def starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(program: str, words: list[str]) -> NoReturn:
        raise Started(words)

    def boot(request: machine.Request) -> NoReturn:
        raise Started(shlex.split(request.command))

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setattr(machine, "run", boot)
    monkeypatch.setattr(tasks, "valkey_server", lambda: 0)


def started(name: str, *arguments: str) -> list[str]:
    with pytest.raises(Started) as caught:
        tasks.test(name, *arguments)
    return list(caught.value.args[0])


@pytest.mark.parametrize("name", tasks.TARGETS)
def test_named_tests_replace_folders(name: str) -> None:
    *_, folder, results = started(name)
    assert (ROOT / folder).exists()
    assert started(name, "-k", "a or b")[-4:] == [folder, results, "-k", "a or b"]
    chosen = started(name, "tests/unit/test_x.py")
    assert folder not in chosen
    assert chosen[-2:] == [results, "tests/unit/test_x.py"]


def test_doctor_runs_where_no_argument_chooses_tests() -> None:
    assert started("rxe")[:2] == ["tests/vm/guest/mended.sh", "&&"]
    assert started("rxe", "-v")[0] == started("siw")[0] == "python"
    assert os.environ["PROVIDER"] == "siw"
    assert os.environ["AIORDMA_TEST_DEVICE"] == "siw0"


def test_unknown_device_of_dask_is_named() -> None:
    with pytest.raises(TestBedError, match="dask-rxe"):
        tasks.test("dask-mlx5")

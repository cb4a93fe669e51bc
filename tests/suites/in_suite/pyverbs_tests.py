"""Run rdma-core's tests of pyverbs in a process of its own: pyverbs_tests.py FOLDER DEVICE.

The folder has their package `tests`. Prints a line of JSON for each test. The tests take a device's
IP address from the kernel's sysfs, where the software device is not: it has every address.
"""

import json
import sys
import unittest
from typing import Any

ADDRESS = "127.0.0.1"


class Result(unittest.TestResult):
    """Prints each test's outcome."""

    def _print(self, test: Any, outcome: str, why: str = "") -> None:
        print(json.dumps({"test": test.id(), "outcome": outcome, "why": why}), flush=True)

    def addSuccess(self, test: Any) -> None:
        self._print(test, "passed")

    def addFailure(self, test: Any, error: Any) -> None:
        self._print(test, "failed", _last_line(error))

    def addError(self, test: Any, error: Any) -> None:
        self._print(test, "failed", _last_line(error))

    def addSkip(self, test: Any, reason: str) -> None:
        self._print(test, "skipped", reason)


def _last_line(error: Any) -> str:
    return f"{error[0].__name__}: {error[1]}"


def _with_address(test: Any, device: str, port: int, index: int) -> None:
    test.args.append([device, port, index, ADDRESS, None])


def main() -> None:
    """Import the tests from the folder, and run them."""
    folder, device = sys.argv[1:]
    sys.path[:0] = [folder, f"{folder}/tests"]
    sys.argv = ["run_tests", "--dev", device]
    parser = __import__("args_parser").parser
    parser.parse_args()
    tests = __import__("tests")
    __import__("tests.base")
    tests.base.RDMATestCase._get_ip_mac = _with_address
    unittest.defaultTestLoader.loadTestsFromModule(tests).run(Result())


main()

"""On PYTHONPATH while sanitizers run: our extensions come from the build that they instrumented, in
every process that a test starts."""

import ctypes
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

PACKAGE, NAMES = "aiordma._native.", ("_binding", "_engine")


class Sanitized(MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(PACKAGE) or name.removeprefix(PACKAGE) not in NAMES:
            return None
        (found,) = Path(os.environ["AIORDMA_SANITIZED"]).glob(f"{name.removeprefix(PACKAGE)}.*.so")
        return spec_from_file_location(name, found)


sys.meta_path.insert(0, Sanitized())

# gcc's runtime for undefined behaviour writes to standard error beside another one, whatever its
# options say, where pytest would catch it. It has a function of its own for the place.
for runtime in os.environ.get("LD_PRELOAD", "").split():
    if "ubsan" in runtime:
        place = os.environ["AIORDMA_SANITIZER_REPORTS"] + "/undefined"
        ctypes.CDLL(runtime).__sanitizer_set_report_path(place.encode())

"""Compile the binding in cffi's API mode, so that the C compiler checks every declaration.

What Python sees is in declarations/, a file per C header; the C that we wrote is beside it, and the
software device in software/. The result links against neither libibverbs nor librdmacm: rdma_core.c
opens them when first used.
"""

import os
import tomllib
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# In the order in which one needs the other.
DECLARATIONS = (
    "verbs.h",
    "rdmacm.h",
    "provider.h",
    "data_path.h",
    "posting.h",
    "objects.h",
    "software.h",
    "faults.h",
)


def ours(pattern: str) -> list[str]:
    """Return the files of the binding that match, from the project's folder, always in one order.

    What cffi itself writes begins with an underscore.
    """
    found = (path for path in HERE.glob(pattern) if not path.name.startswith("_"))
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def version() -> str:
    """Return the package's version: what the software device calls its firmware's."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return str(tomllib.load(file)["project"]["version"])


PREAMBLE = """
#pragma GCC diagnostic ignored "-Wcast-function-type"
#include "provider.h"
#include "data_path.h"
#include "objects.h"
#include "declarations/software.h"
#include "declarations/faults.h"
"""

ffibuilder = FFI()
for name in DECLARATIONS:
    ffibuilder.cdef((HERE / "declarations" / name).read_text())
ffibuilder.set_source(
    "aiordma._native._binding",
    PREAMBLE,
    sources=[*ours("*.c"), *ours("software/*.c")],
    depends=[*ours("*.h"), *ours("declarations/*.h"), *ours("software/*.h")],
    define_macros=[("SW_VERSION", f'"{version()}"')],
    include_dirs=["aiordma/_native"],
    libraries=["dl", "pthread"],
    extra_compile_args=[
        "-std=gnu11",
        "-O2",
        "-Wall",
        "-Wextra",
        "-fvisibility=hidden",
        *(["-Werror"] if os.environ.get("AIORDMA_WERROR") else []),  # see setup.py
    ],
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)

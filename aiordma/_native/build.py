"""Compile the binding in cffi's API mode, so that the C compiler checks every declaration.

What Python sees is in declarations/, a file per C header; the C that we wrote is beside it. The
result links against neither libibverbs nor librdmacm: rdma_core.c opens them when first used.
"""

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
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
HEADERS = ("data_path.h", "posting.h", "objects.h")
SOURCES = (
    "rdma_core.c",
    "data_path.c",
    "posting.c",
    "objects.c",
    *sorted(f"software/{path.name}" for path in (HERE / "software").glob("*.c")),
)

PREAMBLE = """
#pragma GCC diagnostic ignored "-Wcast-function-type"
#include "provider.h"
#include "data_path.h"
#include "posting.h"
#include "objects.h"
#include "software/faults.h"
"""

ffibuilder = FFI()
for name in DECLARATIONS:
    ffibuilder.cdef((HERE / "declarations" / name).read_text())
ffibuilder.set_source(
    "aiordma._native._binding",
    PREAMBLE,
    sources=[f"aiordma/_native/{source}" for source in SOURCES],
    depends=[
        *(f"aiordma/_native/declarations/{name}" for name in DECLARATIONS),
        *(f"aiordma/_native/{name}" for name in ("provider.h", *HEADERS)),
        *sorted(f"aiordma/_native/software/{path.name}" for path in HERE.glob("software/*.h")),
    ],
    include_dirs=["aiordma/_native"],
    libraries=["dl", "pthread"],
    extra_compile_args=[
        *("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"),
    ],
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)

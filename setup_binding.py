"""Compile the binding in cffi's API mode.

The declarations are in aiordma/_native/declarations. The C code, which includes them too, is beside
that folder, and the software device is in software/. The build needs nothing of rdma-core: its
types are declared in declarations/verbs.h and rdmacm.h, and rdma_core.c opens its libraries at the
first use. This script is outside the package, so that no wheel contains it.
"""

import os
import re
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent
NATIVE = ROOT / "aiordma" / "_native"
# Each file uses only declarations of the files before it.
DECLARATIONS = (
    "verbs.h",
    "rdmacm.h",
    "provider.h",
    "data_path.h",
    "posting.h",
    "objects.h",
    "software.h",
    "faults.h",
    "simulation.h",
)


def ours(pattern: str) -> list[str]:
    """Return the binding's files that match, sorted, relative to the project's folder.

    The files that cffi writes begin with an underscore, and are left out.
    """
    found = (path for path in NATIVE.glob(pattern) if not path.name.startswith("_"))
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def version() -> str:
    """Return the package's version, which is the software device's firmware version."""
    source = (ROOT / "aiordma" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert found
    return found[1]


PREAMBLE = """
#pragma GCC diagnostic ignored "-Wcast-function-type"
#include "provider.h"
#include "data_path.h"
#include "objects.h"
#include "declarations/software.h"
#include "declarations/faults.h"
#include "declarations/simulation.h"
"""

# The C library's types in those declarations: cffi takes their sizes from the C compiler.
C_LIBRARY = """
typedef struct { ...; } pthread_mutex_t;
typedef struct { ...; } pthread_cond_t;
struct sockaddr { ...; };
struct sockaddr_in { ...; };
struct sockaddr_in6 { ...; };
struct sockaddr_storage { ...; };
"""

ffibuilder = FFI()
ffibuilder.cdef(C_LIBRARY)
for name in DECLARATIONS:
    ffibuilder.cdef((NATIVE / "declarations" / name).read_text())
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

"""The compiled half of the build: cffi generates and compiles aiordma._native._binding, and the hot
path is an extension of its own, aiordma._native._engine."""

from glob import glob

from setuptools import Extension, setup

WARNINGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]

engine = Extension(
    "aiordma._native._engine",
    sources=[
        *sorted(glob("aiordma/_native/engine/*.c")),
        "aiordma/_native/data_path.c",
        "aiordma/_native/posting.c",
    ],
    depends=sorted(
        glob("aiordma/_native/engine/*.h")
        + glob("aiordma/_native/*.h")
        + glob("aiordma/_native/declarations/*.h")
    ),
    include_dirs=["aiordma/_native"],
    # Method tables hold functions of several kinds under one type.
    extra_compile_args=[
        *WARNINGS,
        "-flto",  # a post goes through most of its rooms
        "-Wno-cast-function-type",
        "-Wno-missing-field-initializers",
    ],
    extra_link_args=["-flto", "-O2"],
)

setup(cffi_modules=["aiordma/_native/build.py:ffibuilder"], ext_modules=[engine])

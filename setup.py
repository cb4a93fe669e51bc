"""The compiled half of the build: cffi generates and compiles aiordma._native._binding; the hot
path is an extension of its own, aiordma._native._engine; the libraries that `aiordma exec` puts in
front of a program contain the software device once more. And what the package's page says: the
README, whose links have to be absolute there."""

import os
import re
import shlex
import subprocess
import sysconfig
import tomllib
from collections.abc import Iterable
from glob import glob
from pathlib import Path
from typing import NoReturn

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path(__file__).resolve().parent


def version() -> str:
    """Return the package's version, as setup_binding.py does."""
    found = re.search('__version__ = "(.+)"', (FOLDER / "aiordma/__init__.py").read_text())
    assert found
    return found[1]


class BuildExtension(build_ext):
    """Compile, if everything is there that it takes."""

    def run(self) -> None:
        """Look for the compiler and for Python.h first: the last line says what is missing."""
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        flags = shlex.split(f"{os.environ.get('CPPFLAGS', '')} {os.environ.get('CFLAGS', '')}")
        include = [f"-I{folder}" for folder in self.include_dirs]
        try:
            found = subprocess.run(
                [*compiler, *flags, *include, "-E", "-"],
                input=b"#include <Python.h>\n",
                capture_output=True,
            )
        except OSError as error:
            problem = f"the C compiler {compiler[0]!r} cannot be run ({error.strerror})"
            refuse(problem, "gcc", "gcc")
        if found.returncode:
            refuse("missing C header: Python.h", "python3-dev", "python3-devel")
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        """Return the file of a module, or of a library for programs in C."""
        if fullname.rpartition(".")[2] in ("libibverbs", "librdmacm"):
            return f"{fullname.replace('.', '/')}.so.1"
        return str(super().get_ext_filename(fullname))  # type: ignore[no-untyped-call]

    def build_extension(self, ext: Extension) -> None:
        """Compile and link; of the libraries, the second one is linked to the first."""
        if ext.name == librdmacm.name:
            ext.extra_objects.append(self.get_ext_fullpath(libibverbs.name))
        super().build_extension(ext)


def refuse(problem: str, debian: str, fedora: str) -> NoReturn:
    """End the build; pip shows the text."""
    raise SystemExit(
        f"error: aiordma cannot be compiled: {problem}. Install it: `apt-get install {debian}` on "
        f"Debian and Ubuntu, `dnf install {fedora}` on Fedora"
    )


# Warnings are errors in the project's own builds (Makefile) only: a newer compiler warns of more.
WARNINGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden"]
if os.environ.get("AIORDMA_WERROR"):
    WARNINGS.append("-Werror")

engine = Extension(
    "aiordma._native._engine",
    sources=sorted(glob("aiordma/_native/engine/*.c")),
    depends=sorted(
        glob("aiordma/_native/engine/*.h")
        + glob("aiordma/_native/*.h")
        + glob("aiordma/_native/declarations/*.h")
    ),
    include_dirs=["aiordma/_native"],
    # Method tables hold functions of several kinds under one type.
    extra_compile_args=[
        *WARNINGS,
        "-O3",  # as fast as link-time optimisation, which needs a plug-in of the compiler
        "-ftls-model=initial-exec",  # a thread's first use needs no memory
        "-Wno-cast-function-type",
        "-Wno-missing-field-initializers",
    ],
)


def library(name: str, files: tuple[str, ...], below: Iterable[str] = ()) -> Extension:
    """Return a library with the symbol versions of rdma-core's library of that name."""
    folder = "aiordma/_native/exported"
    return Extension(
        f"aiordma._native.exported.{name}",
        sources=[*(f"{folder}/{each}.c" for each in files), *sorted(below)],
        depends=[
            f"{folder}/{name}.map",
            *sorted(glob(f"{folder}/*.h") + glob("aiordma/_native/software/*.h")),
            *sorted(glob("aiordma/_native/*.h") + glob("aiordma/_native/declarations/*.h")),
        ],
        include_dirs=["aiordma/_native"],
        define_macros=[("SW_VERSION", f'"{version()}"')],
        libraries=["pthread"],
        extra_compile_args=WARNINGS,
        extra_link_args=[
            f"-Wl,-soname,{name}.so.1",
            f"-Wl,--version-script,{folder}/{name}.map",
            "-Wl,--no-undefined",
            "-Wl,-z,nodelete",  # a program may close the library, and the engine's thread goes on
            "-Wl,-rpath,$ORIGIN",
        ],
    )


libibverbs = library(
    "libibverbs",
    ("driver_calls", "one_device", "verbs_calls", "verbs_texts"),
    glob("aiordma/_native/software/*.c"),
)
librdmacm = library("librdmacm", ("cm_calls", "rsockets", "synchronous"))


def described(readme: str, repository: str) -> str:
    """Return the README with the links into the repository absolute, or without them if there is
    no public repository: a page of the package elsewhere has no files beside it."""

    def absolute(link: re.Match[str]) -> str:
        text, target = link.groups()
        kind = "tree" if target.endswith("/") else "blob"
        return f"[{text}]({repository}/{kind}/main/{target})" if repository else text

    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)", absolute, readme)


REPOSITORY = tomllib.loads((FOLDER / "pyproject.toml").read_text())["tool"]["aiordma"]["repository"]
URLS = {
    "Repository": REPOSITORY,
    "Documentation": f"{REPOSITORY}/blob/main/docs/index.md",
    "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
    "Issues": f"{REPOSITORY}/issues",
}

setup(
    long_description=described((FOLDER / "README.md").read_text(), REPOSITORY),
    long_description_content_type="text/markdown",
    project_urls=URLS if REPOSITORY else {},
    cffi_modules=["setup_binding.py:ffibuilder"],
    ext_modules=[engine, libibverbs, librdmacm],
    cmdclass={"build_ext": BuildExtension},
)

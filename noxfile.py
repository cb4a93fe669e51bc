"""The tests on each CPython that this machine has: `pip install nox`, and then `nox`, or
`nox -s tests-3.13 -- tests/unit`.

nox skips an interpreter that it does not find, and says so at its end. Without arguments the
session runs tests/unit and tests/device on the software device, on asyncio; AIORDMA_TEST_LOOPS
names other event loops.
"""

import os

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False

INTERPRETERS = ("3.11", "3.12", "3.13", "3.14", "3.14t")


@nox.session(python=INTERPRETERS)
def tests(session: nox.Session) -> None:
    """Compile the extensions beside their sources, and run the tests."""
    session.install("setuptools>=77", "cffi>=1.16")
    session.install(
        *(
            "--no-build-isolation",
            "--config-settings",
            "editable_mode=compat",
            "-e",
            ".[test]",
            "ruff>=0.6",
        )
    )
    session.run("python", "setup.py", "-q", "build_ext", "--inplace")
    os.makedirs("build", exist_ok=True)
    session.run("make", "-s", "build/fork-client", external=True)
    session.run(
        *("python", "-m", "pytest", "-q", "-n", "2"),
        *("--dist", "loadfile", "--no-loadscope-reorder"),
        *(session.posargs or ("tests/unit", "tests/device")),
        env={
            "AIORDMA_TEST_DEVICE": "software",
            "AIORDMA_TEST_LOOPS": os.environ.get("AIORDMA_TEST_LOOPS", "asyncio"),
        },
    )

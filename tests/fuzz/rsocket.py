"""The fuzzer of rsockets' protocol: libFuzzer, by Atheris, chooses inputs of `rsocket_driver` by
what they reach. Its arguments are libFuzzer's.
"""

import sys

import atheris

with atheris.instrument_imports(include=["aiordma.streams", "tests.fuzz.model_path"]):
    from tests.fuzz.rsocket_driver import run_both


def play(data: bytes) -> None:
    """Play one input."""
    run_both(data)


if __name__ == "__main__":
    atheris.Setup(sys.argv, play)
    atheris.Fuzz()

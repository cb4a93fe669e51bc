"""The fuzzer of a stream's calls: libFuzzer, by Atheris, chooses inputs of `stream_calls` by what
they reach. Its arguments are libFuzzer's.
"""

import sys

import atheris

with atheris.instrument_imports(include=["aiordma.streams", "tests.fuzz.model_path"]):
    from tests.fuzz.stream_calls import run_calls


def play(data: bytes) -> None:
    """Play one input."""
    run_calls(data)


if __name__ == "__main__":
    atheris.Setup(sys.argv, play)
    atheris.Fuzz()

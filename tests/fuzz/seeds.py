"""Inputs to begin with."""


def of(target: str) -> dict[str, bytes]:
    return {"empty": b""}

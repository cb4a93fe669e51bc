"""Counts of the software device's objects, for a test to compare before and after."""

from aiordma._native import ffi, lib

__all__ = ("software_objects",)


def software_objects() -> dict[str, int]:
    """Return how many objects of each kind this process has on the software device: domains,
    regions, queue pairs, identifiers, sockets, ... Later versions may add kinds."""
    counts = ffi.new("struct aiordma_software_counts *")
    lib.aiordma_software_counts(counts)
    fields = ffi.typeof("struct aiordma_software_counts").fields
    return {name: int(getattr(counts, name)) for name, _ in fields}

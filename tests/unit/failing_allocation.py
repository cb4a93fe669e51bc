"""For child programs that let one allocation fail, by `_testcapi.set_nomemory`, each in turn."""


def is_still_to_come() -> bool:
    """Return whether the allocation that fails is one of the next ones: what was called before did
    not get as far as that."""
    try:
        for _ in range(12):
            bytearray(9)
    except MemoryError:
        return True
    return False

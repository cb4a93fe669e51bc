"""Re-registrations and migrations that find no memory: a region is unchanged, or can only be
closed, and each object closes before its old and its new parent.

One allocation fails at a time, each in turn, until there is none left to fail."""

import pytest

from tests.unit.child import run_child

pytest.importorskip("_testcapi")

pytestmark = pytest.mark.natively

SWEEP = """
import faulthandler
import _testcapi
from aiordma import Access, ClosedError, VerbsCallError
from aiordma.testing import Faults, software_objects
from aiordma.verbs import Device, MemoryRegion
from tests.unit.failing_allocation import is_still_to_come

faulthandler.dump_traceback_later(100, exit=True)

def is_free(buffer):
    try:
        buffer.append(0)
    except BufferError:
        return False
    return True

def attempt(context, number, old_first):
    old, new = context.alloc_pd(), context.alloc_pd()
    # As many children as make the next one resize the dictionary, in some of the attempts.
    fill = [MemoryRegion(domain, bytearray(8)) for domain in (old, new) for _ in range(number % 7)]
    before, after = bytearray(64), bytearray(4096)
    region = MemoryRegion(old, before, Access.REMOTE_WRITE)
    address, is_over, raised = region.address, False, True
    _testcapi.set_nomemory(number, number + 1)
    try:
        region.reregister(domain=new, buffer=after)
        raised, is_over = False, is_still_to_come()
    except (MemoryError, SystemError, VerbsCallError):
        pass
    finally:
        _testcapi.remove_mem_hooks()
    state = "changed"
    if raised:
        try:
            remote = region.remote()
        except ClosedError as error:
            assert "can only be closed now" in str(error)
            state = "unknown"
            assert not region._usable, number
        else:
            state = "unchanged"
            assert (remote.address, remote.length) == (address, 64), number
            assert (region.domain, region._usable) == (old, True), number
    if state != "changed":
        assert id(region) in old._children, number
    if state != "unchanged":
        assert id(region) in new._children, number
        assert not is_free(after), number
    else:
        assert not is_free(before), number
    for domain in (old, new) if old_first else (new, old):
        domain.close()
        assert domain.closed, number
    assert region.closed, number
    assert is_free(before) and is_free(after), number
    return state, is_over

def sweep(context, old_first):
    empty, states = software_objects(), set()
    for number in range(2000):
        state, is_over = attempt(context, number, old_first)
        states.add(state)
        assert software_objects() == empty, number
        if is_over:
            return sorted(states)
"""


@pytest.mark.parametrize("old_first", [True, False])
def test_reregister_without_memory_leaves_a_known_state(old_first: bool) -> None:
    printed = run_child(
        SWEEP, f"with Device('software').open() as context: print(sweep(context, {old_first}))"
    )
    assert printed == "['changed', 'unchanged', 'unknown']\n"


def test_refused_reregister_without_memory_leaves_a_known_state() -> None:
    printed = run_child(
        SWEEP,
        """
        with Device("software").open() as context, Faults() as faults:
            faults.refuse_call("rereg_mr", 1, times=0)
            for number in range(60):
                state, _ = attempt(context, number, True)
                assert state != "changed"
            print(state)
        """,
    )
    assert printed == "unknown\n"


def test_migration_without_memory_closes_before_both_channels() -> None:
    printed = run_child(
        SWEEP,
        """
        from aiordma import EventChannel, Identifier
        from aiordma._base.provider import software

        migrate, has_moved = software().migrate_id, [False]

        def migrate_id(identifier, channel):
            result = migrate(identifier, channel)
            has_moved[0] = True
            return result

        software().migrate_id = migrate_id
        empty, raised = software_objects(), 0
        for number in range(2000):
            old, new = EventChannel(software()), EventChannel(software())
            fill = [Identifier(channel) for channel in (old, new) for _ in range(number % 7)]
            identifier, is_over = Identifier(old), False
            has_moved[0] = False
            _testcapi.set_nomemory(number, number + 1)
            try:
                identifier.migrate(new)
                is_over = is_still_to_come()
            except (MemoryError, SystemError):
                raised += 1
            finally:
                _testcapi.remove_mem_hooks()
            first, second = (new, old) if has_moved[0] else (old, new)
            first.close()
            assert identifier.closed, number
            second.close()
            assert software_objects() == empty, number
            if is_over:
                break
        print("over" if is_over and raised > 3 else "not over")
        """,
    )
    assert printed == "over\n"

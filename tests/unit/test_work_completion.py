"""A WorkCompletion behaves as a named tuple."""

import pickle
from typing import Any

import pytest

from aiordma.verbs import WorkCompletion, WorkCompletionFlag, WorkCompletionOpcode

NUMBERS = (2**63 + 7, 0, 128, 3, 4, 2**32 - 1, 6, 7, 2, 9, 10, 11, 12, 0)
NAMES = (
    *("wr_id", "status", "opcode", "vendor_err", "byte_len", "immediate", "qp_num", "src_qp"),
    *("wc_flags", "pkey_index", "slid", "sl", "dlid_path_bits", "reserved"),
)


def test_its_fields_are_those_of_the_manual_page_in_order() -> None:
    completion = WorkCompletion._make(NUMBERS)
    assert completion._fields == NAMES
    assert tuple(completion) == NUMBERS
    assert len(completion) == 14
    assert [getattr(completion, name) for name in NAMES] == list(NUMBERS)
    assert completion._asdict() == dict(zip(NAMES, NUMBERS, strict=True))
    assert (completion[0], completion[4], completion[-2]) == (2**63 + 7, 4, 12)
    with pytest.raises(IndexError):
        completion[14]
    wr_id, *others = completion
    assert (wr_id, len(others)) == (2**63 + 7, 13)


def test_it_is_made_by_place_and_by_name() -> None:
    whole = WorkCompletion._make(NUMBERS)
    assert WorkCompletion(*NUMBERS) == whole
    assert WorkCompletion(*NUMBERS[:13]) == whole  # what is reserved is 0
    assert WorkCompletion(*NUMBERS[:5], **dict(zip(NAMES[5:], NUMBERS[5:], strict=True))) == whole
    with pytest.raises(TypeError):
        WorkCompletion(*NUMBERS[:12])  # type: ignore[call-arg]


def test_it_equals_what_has_the_same_numbers() -> None:
    one, same = WorkCompletion._make(NUMBERS), WorkCompletion._make(list(NUMBERS))
    other = WorkCompletion._make((1, *NUMBERS[1:]))
    assert one == same == NUMBERS
    assert one != other
    assert one != "a completion"
    assert hash(one) == hash(same)
    assert len({one, same, other}) == 2
    assert pickle.loads(pickle.dumps(one)) == one


def test_it_says_what_it_means() -> None:
    completion = WorkCompletion._make(NUMBERS)
    assert completion.ok
    assert completion.status_name == "SUCCESS"
    assert completion.operation is WorkCompletionOpcode.RECV
    assert completion.flags is WorkCompletionFlag.WITH_IMM
    assert not WorkCompletion._make((1, 5, *NUMBERS[2:])).ok
    assert WorkCompletion._make((1, 999, *NUMBERS[2:])).status_name == "status 999"


def test_its_repr_names_status_and_opcode() -> None:
    assert repr(WorkCompletion._make(NUMBERS)) == (
        "WorkCompletion(wr_id=0x8000000000000007, status=SUCCESS, opcode=RECV, byte_len=4, "
        "immediate=0xffffffff, qp_num=0x6)"
    )
    assert repr(WorkCompletion._make((1, 0, 2, 0, 64, 0, 17, *[0] * 7))) == (
        "WorkCompletion(wr_id=0x1, status=SUCCESS, opcode=RDMA_READ, byte_len=64, qp_num=0x11)"
    )
    assert "opcode=UNKNOWN_99" in repr(WorkCompletion._make((1, 0, 99, *NUMBERS[3:])))


def test_its_repr_shows_what_is_valid_of_a_failure() -> None:
    # man ibv_poll_cq: of a failed one, only these fields are.
    assert repr(WorkCompletion._make((1, 5, *NUMBERS[2:]))) == (
        "WorkCompletion(wr_id=0x1, status=WR_FLUSH_ERR, vendor_err=0x3, qp_num=0x6)"
    )
    assert "status=status 999" in repr(WorkCompletion._make((1, 999, *NUMBERS[2:])))


def test_completion_keywords_are_checked_as_those_of_a_named_tuple() -> None:
    fields = dict(zip(NAMES, NUMBERS, strict=True))
    completion: Any = WorkCompletion
    assert completion(**fields) == WorkCompletion._make(NUMBERS)
    assert completion(NUMBERS[0], **dict(list(fields.items())[1:])).wr_id == NUMBERS[0]
    with pytest.raises(TypeError, match="no field 'length'"):
        completion(**fields, length=1)
    with pytest.raises(TypeError, match="wr_id is given twice"):
        completion(NUMBERS[0], **fields)
    del fields["status"]
    with pytest.raises(TypeError, match="status is missing"):
        completion(**fields)

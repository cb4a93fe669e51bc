"""Address vectors: every field of the C struct makes the way there and back."""

from typing import Any, cast

import pytest

from aiordma.verbs import AddressVector
from aiordma.verbs.queue_pair import modify_arguments
from tests.internals import QueuePairAttribute, ffi


def written(vector: AddressVector) -> Any:
    raw = ffi.new("struct ibv_ah_attr *")
    vector._fill(raw)
    return raw


@pytest.mark.parametrize("gid", [None, bytes(range(16))], ids=["local", "global"])
def test_every_field_of_a_path_is_kept(gid: bytes | None) -> None:
    numbers = {} if gid is None else {"gid_index": 2, "hop_limit": 3, "flow_label": 4}
    if gid is not None:
        numbers["traffic_class"] = 5
    vector = AddressVector(
        port=1, gid=gid, lid=6, service_level=7, src_path_bits=8, static_rate=9, **numbers
    )
    raw = written(vector)
    assert (raw.src_path_bits, raw.static_rate) == (8, 9)
    kept = AddressVector._read(raw)
    assert bytes(ffi.buffer(written(kept))) == bytes(ffi.buffer(raw))
    if gid is not None:
        assert kept == vector


def test_arguments_of_modify_keep_the_path() -> None:
    """librdmacm says the rate and the path bits of a connection's path."""
    raw = ffi.new("struct ibv_qp_attr *")
    raw.ah_attr.src_path_bits, raw.ah_attr.static_rate = 8, 9
    address = modify_arguments(raw, QueuePairAttribute.AV)["address"]
    assert (address.src_path_bits, address.static_rate) == (8, 9)


@pytest.mark.parametrize("name", ["src_path_bits", "static_rate"])
def test_further_fields_of_a_path_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        AddressVector(**cast(Any, {name: 256}))

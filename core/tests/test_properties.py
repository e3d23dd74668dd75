"""Any file or variable is read, or refused in one line. Every row has one rank, in worlds of up to 100,000 ranks.

python -m pytest core/tests/test_properties.py
"""

import copy
import json
import zlib

import pytest
import torch
from ddp_core import Rank, order, snapshot
from ddp_core.config import _global_batch_size
from ddp_core.errors import Failure, PreflightError, SnapshotError, UsageError
from ddp_core.files import as_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_document import WHOLE, adopted
from test_rank import GOOD, VARIABLES
from test_snapshot import DOCUMENT, TENSORS

# The examples are the same each time, so a failure repeats.
settings.register_profile(
    "ddp", derandomize=True, deadline=None, database=None, max_examples=300, suppress_health_check=[*HealthCheck]
)
settings.load_profile("ddp")

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=True) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def one_line(failure: Failure) -> bool:
    return str(failure).isprintable() and len(str(failure)) < 4100


# ---- snapshots ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple:
    path = tmp_path_factory.mktemp("whole") / "file"
    snapshot.write(path, TENSORS, DOCUMENT)
    return path.read_bytes(), snapshot.read(path), path.with_name("changed")


@pytest.mark.fault(35)
@given(data=st.data())
def test_a_changed_snapshot_is_refused_or_says_the_same(whole, data):
    raw, (tensors, document), path = whole
    raw = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(raw) - 1))
        if data.draw(st.booleans()):
            raw[start] ^= data.draw(st.integers(1, 255))
        else:
            raw[start : start + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=40))
    path.write_bytes(raw)
    try:
        read, said = snapshot.read(path)
    except SnapshotError as error:
        assert one_line(error)
    else:
        assert said == document and all(torch.equal(read[name], tensors[name]) for name in tensors)


@pytest.mark.fault(36)
@given(text=st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_header_is_refused_in_a_line(whole, text):
    path = whole[2]
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(SnapshotError) as caught:
        snapshot.read(path)
    assert one_line(caught.value)


@pytest.mark.fault(36)
@given(value=VALUES, formed=st.booleans(), step=VALUES | st.just(10**400), problem=VALUES | st.just({"optimizer": "adamw"}))
def test_any_document_with_right_checksums_is_refused_or_read(whole, value, formed, step, problem):
    """Documents of format 1 are converted to format 2 first."""
    path = whole[2]
    if isinstance(value, dict):
        value |= dict(format=1, crc32={}, step=step, problem=problem) if formed else {}
        value["document_crc32"] = zlib.crc32(as_json({name: value[name] for name in value if name != "document_crc32"}))
    head = json.dumps({"__metadata__": {"ddp_core": json.dumps(value)}}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    try:
        snapshot.read(path)
    except SnapshotError as error:
        assert one_line(error)


@pytest.mark.fault(36)
@given(data=st.data())
def test_a_document_with_a_part_that_is_another_is_adopted_or_refused_in_a_line(data):
    """The changed part may be anywhere, at any depth."""
    document = copy.deepcopy(WHOLE | dict(numbers=[{"momentum": 0.5}, {}]))
    place, key = document, data.draw(st.sampled_from([*document]))
    while isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from([*place] if isinstance(place, dict) else range(len(place))))
    place[key] = data.draw(VALUES)
    try:
        adopted(document)
    except SnapshotError as error:
        assert one_line(error)


# ---- the environment ----------------------------------------------------------------------------------------------

ODD = (
    st.text(max_size=30)
    | st.integers(-(10**30), 10**30).map(str)
    | st.sampled_from(["2(xabc)", "2(x99999999)", "4(x2)", "9" * 5000])
)


@pytest.mark.fault(9)
@given(changed=st.dictionaries(st.sampled_from([*GOOD]), ODD, max_size=4))
def test_any_environment_is_a_rank_or_refused_in_a_line(changed):
    try:
        rank = Rank.read(GOOD | changed, **VARIABLES)
    except PreflightError as error:
        assert one_line(error) and any(variable in str(error) for variable in GOOD)
    else:
        assert 0 <= rank.local_rank <= rank.rank < rank.world_size and 0 < rank.master_port < 2**16


# ---- the order of rows --------------------------------------------------------------------------------------------


@pytest.mark.fault(23)
@settings(max_examples=15)
@given(world_size=st.integers(1, 100_000), each=st.integers(1, 3), rest=st.integers(0, 10**6), keyed=st.booleans())
def test_the_ranks_of_any_world_share_an_epoch_out_among_them(world_size, each, rest, keyed):
    size = world_size * each
    count = 2 * size + rest % size
    rows = order.keyed_order(7, 0, count, torch.arange(count)) if keyed else order.sample_order(7, 0, count)
    shares = torch.stack([order.rows_of_rank(rows, size, rank, world_size) for rank in range(world_size)], 2)
    assert torch.equal(shares.flatten(), rows[: 2 * size]), "place by place the rows of all ranks are the order"
    assert torch.equal(rows.sort().values, torch.arange(count)), "each row once"


@pytest.mark.fault(23)
@settings(max_examples=60)
@given(world_size=st.integers(1, 100_000), each=st.integers(1, 5), keyed=st.booleans(), data=st.data())
def test_a_rank_of_any_world_has_its_place_in_the_order(world_size, each, keyed, data):
    """Both when the order is sorted, and when it is computed place by place."""
    size, rank = world_size * each, data.draw(st.integers(0, world_size - 1))
    before, order.SORTED_ORDER = order.SORTED_ORDER, 0 if keyed else order.SORTED_ORDER
    try:
        mine = order.Order(2 * size + 1, 7, size, rank, world_size).epoch(3, 1, 2, torch.device("cpu"))
        places = torch.arange(size + rank, 2 * size, world_size)
        whole = order.keyed_order(7, 3, 2 * size + 1, places) if keyed else order.sample_order(7, 3, 2 * size + 1)[places]
        assert torch.equal(next(mine), whole)
    finally:
        order.SORTED_ORDER = before


@pytest.mark.fault(25)
@given(size=st.integers(1, 2**53), parts=st.integers(1, 100_000), accumulate=st.integers(1, 64))
def test_a_batch_divides_or_is_refused_with_one_that_does(size, parts, accumulate):
    try:
        assert _global_batch_size(size, None, accumulate, parts) % (parts * accumulate) == 0
    except UsageError as error:
        assert one_line(error) and str(size) in str(error)

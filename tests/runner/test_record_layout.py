"""Kernels read at constant offsets what the host writes by name: checked against words unpacked
by `struct`.
"""

import struct
from types import SimpleNamespace

import numpy as np
import pytest

from draft_service.steps import records as draft_records
from foredraft.record_layout import WORD, Layout
from foredraft.sampling.columns import SAMPLING
from verify_service.executor import records as target_records

INNER = Layout(("real", np.float32), ("wide", np.uint64))
OUTER = Layout(("first", np.int32), ("inner", INNER), ("last", np.int32))


def test_words_are_where_the_constants_say() -> None:
    kind = OUTER.whole(tokens=3, places=2)
    records = np.zeros(2, kind)
    records["first"], records["last"] = [5, -6], 7
    records["inner"] = INNER.pack([SimpleNamespace(real=0.25, wide=2**64 - 2)] * 2)
    records["tokens"], records["places"] = [[1, 2, 3]] * 2, 9
    words = records.view(np.int32).reshape(2, -1)[1]
    assert OUTER.constants("first", "real", "wide", "last") == {
        "FIRST": 0,
        "REAL": 1,
        "WIDE": 2,
        "LAST": 4,
    }
    low, high = words[OUTER["wide"] :][:2].view(np.uint32)
    assert struct.pack("<II", low, high) == struct.pack("<Q", 2**64 - 2)
    assert words[OUTER["real"]] == struct.unpack("<i", struct.pack("<f", 0.25))[0]
    assert (words[OUTER["first"]], words[OUTER["last"]]) == (-6, 7)
    assert OUTER.size == 8, "a header takes whole 16 bytes"
    assert words[OUTER.size :].tolist() == [1, 2, 3, 9, 9]


@pytest.mark.parametrize("layout", [SAMPLING, target_records.STEP, draft_records.STEP])
def test_no_two_columns_share_a_word(layout: Layout) -> None:
    records = np.zeros(1, layout.whole(rest=2))
    records["rest"] = -1
    for name in layout.dtype.names or ():
        before = records.view(np.int32).copy()
        kind = records.dtype[name]
        records[name] = np.frombuffer(b"\xff" * kind.itemsize, kind)
        changed = np.flatnonzero(records.view(np.int32) != before)
        assert len(changed) == layout.dtype[name].itemsize // WORD
    assert (records.view(np.int32) == -1).sum() == layout.dtype.itemsize // WORD + 2


def test_wrong_declarations_are_refused() -> None:
    with pytest.raises(ValueError, match="column half has 2 bytes"):
        Layout(("half", np.float16))
    with pytest.raises(ValueError, match="two columns are named real"):
        Layout(("inner", INNER), ("real", np.int32))

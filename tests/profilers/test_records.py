import json
import statistics
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from profilers.records import Record
from tests.profilers.testing import gemm_case, gemm_row
from tests.rows import each_row

TIMES = st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=12)


def test_what_a_call_costs_by_hand() -> None:
    # Median 3: repeats up to 9 count, so 10 does not; (1 + 3 + 3 + 9) / 4.
    assert gemm_row(8, 1.0, 3.0, 3.0, 9.0, 10.0).expected_s == 4.0
    assert gemm_row(8, 0.25).expected_s == 0.25
    row = gemm_row(8, 1.0, 1.0, 1.0, 2.5, 2.9)
    assert row.expected_s > row.median_s == 1.0


@settings(deadline=None, max_examples=100)
@given(times_s=TIMES)
def test_what_a_call_costs_is_between_its_fastest_repeat_and_three_medians(
    times_s: list[float],
) -> None:
    row = gemm_row(8, *times_s)
    slack = 1.0 + 1e-9
    assert min(times_s) <= row.expected_s * slack
    assert row.expected_s <= 3.0 * statistics.median(times_s) * slack


@each_row("pause_s", [3.1, 100.0])
def test_a_pause_of_the_machine_is_not_the_calls(pause_s: float) -> None:
    assert gemm_row(8, *[1.0] * 5, pause_s).expected_s == 1.0


def test_a_size_that_no_table_can_hold_is_refused() -> None:
    assert gemm_case(2**63 - 1).axes["m"] == 2**63 - 1
    with pytest.raises(ValueError, match="axis m is more than"):
        gemm_case(2**63)


# A truth value or a text is no number in a stored file; memory may hold numpy's.


class Inner(Record):
    share: float = 1.0


class Outer(Record):
    schema_version: Literal[1] = 1
    count: Annotated[int, Field(ge=1)] | None = None
    times_s: tuple[float, ...] = ()
    by_rank: dict[int, int] = Field(default_factory=dict)
    inner: tuple[Inner, ...] = ()
    is_set: bool = False


def test_json_takes_only_numbers_for_numbers() -> None:
    sound: dict[str, Any] = {
        "schema_version": 1,
        "count": 3,
        "times_s": [1, 2.5],
        "by_rank": {"3": 4},
        "inner": [{"share": 1}],
        "is_set": True,
    }
    assert Outer.model_validate_json(json.dumps(sound)).by_rank == {3: 4}
    for change in (
        {"schema_version": True},
        {"count": True},
        {"count": "3"},
        {"times_s": [1.0, True]},
        {"by_rank": {"3": False}},
        {"inner": [{"share": True}]},
        {"inner": [{"share": "1"}]},
    ):
        with pytest.raises(ValidationError):
            Outer.model_validate_json(json.dumps(sound | change))


def test_numbers_in_memory_may_be_numpys_and_schemas_are_as_without() -> None:
    assert Outer(count=int(np.int64(3)), times_s=(np.float64(2.5),)).times_s == (2.5,)
    with pytest.raises(ValidationError, match="true is not a number"):
        Outer.model_validate({"schema_version": True})
    shown = Outer.model_json_schema()["properties"]
    assert shown["schema_version"]["const"] == 1
    assert shown["times_s"]["items"] == {"type": "number"}

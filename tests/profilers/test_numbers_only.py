"""A truth value or a text is no number in a stored file; memory may hold numpy's."""

import json
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field, ValidationError

from profilers.records import Record


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


def test_memory_may_hold_numpys_numbers_and_no_true_version() -> None:
    made = Outer(count=int(np.int64(3)), times_s=(np.float64(2.5),))
    assert made.times_s == (2.5,)
    with pytest.raises(ValidationError, match="true is not a number"):
        Outer.model_validate({"schema_version": True})


def test_the_published_schema_is_as_without_it() -> None:
    shown = Outer.model_json_schema()["properties"]
    assert shown["schema_version"]["const"] == 1
    assert shown["times_s"]["items"] == {"type": "number"}

"""Every field of a decision is a degree, a knob or follows; every row fits its value."""

from dataclasses import fields
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from tuner.catalog.manifest import CONDITIONAL, MODULES
from tuner.config.columns import Strategies
from tuner.config.knobs import COLUMN_OF_MODULE, FIELD_OF_DEGREE, KNOBS, searched
from tuner.config.train import TrainDecision
from tuner.spec.search import Search

OTHERS = {
    *("expert_data_parallel_size", "recompute", "stage_recompute", "chunks", "pipeline_layout"),
}
"""What follows from degrees, and what differs from stage to stage."""
UNLIMITED = {"overlap_grad_reduce", "overlap_param_gather", "rank_order"}
"""Knobs that are searched, but that a spec's `search` does not name."""


def test_every_field_of_a_decision_is_a_degree_a_knob_or_follows() -> None:
    rows = [knob.field for knob in KNOBS]
    known = [*rows, *FIELD_OF_DEGREE.values(), *OTHERS]
    assert sorted(known) == sorted(TrainDecision.model_fields)


def test_columns_are_those_of_the_formulas_and_each_has_one_source() -> None:
    columns = [
        *(column for knob in KNOBS for column in knob.columns),
        *FIELD_OF_DEGREE,
        *COLUMN_OF_MODULE.values(),
    ]
    assert len(columns) == len(set(columns))
    assert set(columns) <= {one.name for one in fields(Strategies)}
    assert set(COLUMN_OF_MODULE) == MODULES


def test_choices_are_values_of_the_field() -> None:
    for knob in KNOBS:
        kind: Any = TrainDecision.model_fields[knob.field].annotation
        adapter = TypeAdapter(kind)
        for choice in (*knob.choices, *(unit for unit in knob.columns.values() if unit)):
            adapter.validate_python(choice)
        if knob.choices:
            with pytest.raises(ValidationError):
                adapter.validate_python(object())
        assert {one for pair in knob.never_worse for one in pair} <= set(knob.choices)


def test_what_is_searched_can_be_limited() -> None:
    assert {knob.field for knob in searched()} - set(Search.model_fields) == UNLIMITED


def test_features_and_what_is_turned_on_with_a_knob_exist() -> None:
    names = {knob.field for knob in KNOBS}
    assert {knob.field for knob in KNOBS if knob.is_feature} <= set(CONDITIONAL) <= names
    assert {name for knob in KNOBS for name in knob.needs} <= names

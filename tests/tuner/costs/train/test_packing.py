"""Packing rules against the engines' own functions where their packages are installed."""

import importlib
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

from tests.tuner.models import example_model
from tests.tuner.search.train.testing import make_problem
from tuner.costs.train.attention import TILE, packed_columns
from tuner.costs.train.columns_of import shape_of_model
from tuner.costs.train.packing import RULES, PackedRows, Rows, pack_rows
from tuner.spec.accounting import training_flop_per_token
from tuner.spec.documents import TooLong, documents_of_law, histogram
from tuner.spec.serving.lengths import LengthKind, LengthLaw

INPUTS = 1000

Pack = Callable[[list[int], int], Rows]


def imported(*names: str) -> Any:
    """The first module that is there; releases differ in their names."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return pytest.skip(f"{names[0]} is not installed")


def of_bridge(name: str) -> Pack:
    bridge = "megatron.bridge.data"
    rules = imported(f"{bridge}.packing.algorithms", f"{bridge}.datasets.packing_utils")
    pack: Pack = getattr(rules, name)
    return pack


def of_trl(overflow: str) -> Pack:
    import pyarrow as pa

    pack_bfd = imported("trl.data_utils")._pack_bfd

    def pack(tokens: list[int], capacity: int) -> Rows:
        table = pa.table({"input_ids": [list(range(length)) for length in tokens]})
        packed = pack_bfd(table, capacity, on_seq_length_overflow=overflow)
        return packed["seq_lengths"].to_pylist()  # type: ignore[no-any-return]  # lists of lengths

    return pack


def of_torchtitan() -> Pack:
    chats = imported("torchtitan.hf_datasets.text_datasets").ChatDataset

    def pack(tokens: list[int], capacity: int) -> Rows:
        made = object.__new__(chats)
        made.seq_len, made.infinite, made._eos_id, made._dataset_id = capacity, False, 0, ""
        made._sample_idx, made._epoch, made._data = 0, 0, tokens
        for name in ("inputs", "labels", "positions"):
            setattr(made, f"_{name}_buffer", [])
        made._pending_input_ids, made._pending_label_ids = [], []
        made._tokenize_sample = lambda length: ([1] * length, [1] * length)
        rows = []
        for inputs, _ in made:
            # Padding is a document of its own, of token 0.
            starts = np.flatnonzero(inputs["positions"].numpy() == 0).tolist()
            kept = [start for start in starts if inputs["input"][start]]
            rows.append(np.diff([*kept, int(inputs["input"].sum())]).tolist())
        return rows

    return pack


def drawn_inputs() -> list[tuple[list[int], int]]:
    rng = random.Random(5)
    inputs = []
    for _ in range(INPUTS):
        capacity = rng.choice((16, 64, 100, 1024))
        heavy = rng.random() < 0.5
        count = rng.randint(1, 60)
        tokens = [
            min(capacity, 1 + int(capacity * rng.random() ** (4 if heavy else 1)))
            for _ in range(count)
        ]
        inputs.append((tokens, capacity))
    return inputs


ENGINES: dict[str, Callable[[], Pack]] = {
    "first_fit_shuffle": lambda: of_bridge("first_fit"),
    "first_fit_decreasing": lambda: of_bridge("first_fit_decreasing"),
    "best_fit_decreasing": lambda: of_trl("truncate"),
    "knapsack": lambda: imported("llamafactory.data.processor.processor_utils").greedy_knapsack,
    "next_fit": of_torchtitan,
}


@pytest.mark.parametrize("rule", ENGINES)
def test_rows_are_those_of_the_engine(rule: str) -> None:
    pack = ENGINES[rule]()
    for tokens, capacity in drawn_inputs():
        expected = [list(map(int, row)) for row in pack(list(tokens), capacity)]
        assert RULES[rule].pack(tokens, capacity) == expected, (tokens, capacity)


def test_documents_that_are_split_lie_as_in_trl() -> None:
    pack = of_trl("split")
    for tokens, capacity in drawn_inputs():
        longer = [3 * length for length in tokens]
        documents = histogram(np.array(longer), np.ones(len(longer)))
        pieces = documents.limited(capacity, TooLong.SPLIT)
        each = np.repeat(pieces.tokens_K, pieces.count_K.astype(int)).tolist()
        assert RULES["best_fit_decreasing"].pack(each, capacity) == pack(longer, capacity)


def test_every_rule_keeps_all_tokens_and_no_row_overflows() -> None:
    for name, rule in RULES.items():
        for tokens, capacity in drawn_inputs()[:200]:
            rows = rule.pack(tokens, capacity)
            assert sum(map(sum, rows)) == sum(tokens), name
            assert max(map(sum, rows)) <= capacity, name
            if not rule.continues:
                assert sorted(chain.from_iterable(rows)) == sorted(tokens), name


def brute_pairs(rows: PackedRows, keys_of: Callable[[int], int]) -> int:
    """Unmasked pairs of a block-diagonal causal mask, query by query."""
    return sum(
        sum(min(position + 1, keys_of(position)) for position in range(length))
        for length in rows.tokens_D.tolist()
    )


def test_pairs_of_packed_rows_equal_the_mask() -> None:
    law = LengthLaw(kind=LengthKind.LOGNORMAL, mean=90, cv=1.5)
    documents = documents_of_law(law).limited(1024, TooLong.CUT)
    for rule in RULES:
        rows = pack_rows(documents, rule=rule, capacity=1024)
        slots = rows.num_rows * rows.capacity
        plain = packed_columns(shape_of_model(example_model("qwen3-30b-a3b"), mtp_layers=0), rows)
        causal = brute_pairs(rows, lambda position: position + 1)
        assert plain["attended"] == pytest.approx(causal / slots, rel=1e-12), rule
        assert plain["document"] == pytest.approx(2 * causal / slots - 1, rel=1e-12), rule
        windowed = packed_columns(shape_of_model(example_model("gpt-oss-20b"), mtp_layers=0), rows)
        near = brute_pairs(rows, lambda _: 128 + int(TILE))
        assert windowed["attended"] == pytest.approx((causal + near) / 2 / slots, rel=1e-12), rule


def test_flops_of_classes_are_those_of_the_documents() -> None:
    documents = documents_of_law(LengthLaw(kind=LengthKind.LOGNORMAL, mean=900, cv=1.5))
    for model, error in (("qwen3-30b-a3b", 1e-9), ("gpt-oss-20b", 2e-3)):
        problem = make_problem(model)
        rows = pack_rows(documents, rule="first_fit_shuffle", capacity=8192)
        exact = sum(
            length * training_flop_per_token(problem.model, sequence_length=length)
            for length in rows.tokens_D.tolist()[:2000]
        )
        some = replace(rows, tokens_D=rows.tokens_D[:2000], row_D=rows.row_D[:2000])
        slots = some.num_rows * some.capacity
        packed = replace(problem, rows=some)
        assert packed.flop_per_token * slots == pytest.approx(exact, rel=error), model

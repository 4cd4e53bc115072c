"""Traces of all formats read alike, in bounded memory, and damage is named with its line."""

import tracemalloc
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.expect import present, refused
from tests.rows import each_row
from tests.tuner.spec.serving.testing import FORMATS, Form
from tuner.errors import SpecError
from tuner.spec.serving import trace_summary, traces
from tuner.spec.serving.trace_summary import TraceSummary, summarise_trace
from tuner.spec.serving.traces import trace_chunks

ROWS = [(0.0, 100, 10), (0.5, 200, 20), (0.5, 5, 0), (25.25, 300, 1)]
Write = Callable[[str], Path]


@each_row("form", FORMATS.values())
def test_all_formats_say_the_same(form: Form, write: Write) -> None:
    (chunk,) = trace_chunks(write(form(ROWS)))
    assert chunk.arrival_s_N.tolist() == pytest.approx([0.0, 0.5, 25.25])
    assert chunk.input_tokens_N.tolist() == [100, 200, 300]
    assert chunk.output_tokens_N.tolist() == [10, 20, 1]
    assert chunk.failed == 1


@each_row("form", FORMATS.values())
def test_chunks_join_without_a_seam(
    form: Form, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "CHUNK_ROWS", 3)
    rows = [(time_s + 3.0, 1, 1) for time_s in range(8)]
    chunks = list(trace_chunks(write(form(rows))))
    assert [len(chunk.arrival_s_N) for chunk in chunks] == [3, 3, 2]
    joined = np.concatenate([chunk.arrival_s_N for chunk in chunks])
    assert joined.tolist() == pytest.approx(list(range(8)))


@each_row("form", FORMATS.values())
def test_times_that_go_back_are_found_across_chunks_too(
    form: Form, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "CHUNK_ROWS", 2)
    path = write(form([(0.0, 1, 1), (2.0, 1, 1), (1.0, 1, 1)]))
    line = 3 if form([]) == "" else 4
    with pytest.raises(SpecError, match=f"line {line}: .* is before the row above; sort by time"):
        list(trace_chunks(path))


@each_row("suffix", ["+00:00", "Z"])
def test_azure_times_may_say_that_they_are_utc(write: Write, suffix: str) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    text = f"2024-05-10 00:00:00.0099307{suffix},1,2\n2024-05-10 00:00:01{suffix},1,2\n"
    (chunk,) = trace_chunks(write(header + text))
    assert chunk.arrival_s_N.tolist() == pytest.approx([0.0, 0.9900693], abs=1e-9)


def test_other_columns_and_formats_change_nothing(write: Write) -> None:
    text = '\ufeffNumImages,"GeneratedTokens",TIMESTAMP,ContextTokens\r\n'
    text += "0,7,2024-05-10 00:00:00,9\r\n\r\n"
    (chunk,) = trace_chunks(write(text))
    assert (chunk.input_tokens_N.tolist(), chunk.output_tokens_N.tolist()) == ([9], [7])
    (chunk,) = trace_chunks(
        write("Timestamp,Request tokens,Response tokens\n1,2,3\n"), with_blocks=True
    )
    assert chunk.blocks is None
    with pytest.raises(SpecError, match="input and output tokens: 1; a load has two"):
        described(write(burst([(0.0, 5, 5), (1.0, 5, 0)])))


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,1\n"
BURST = "Timestamp,Request tokens,Response tokens\n1,1,1\n"
MOONCAKE = '{"timestamp": 1, "input_length": 1, "output_length": 1}\n'


@each_row(
    ("text", "said"),
    [
        ("", "the first line is of no known trace"),
        ("time,tokens\n1,2\n", "of no known trace .azure: TIMESTAMP, ContextTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        (AZURE + "yesterday,1,1\n", "line 3: 'yesterday' is no date"),
        (AZURE + "2023-11-16 18:17:04-05:00,1,1\n", "line 3: .* is no date"),
        (AZURE + "NaT,1,1\n", "line 3: 'NaT' is no date"),
        (AZURE + "2023-11-16 18:17:04,1\n", "line 3: 2 cells, 3 are needed"),
        (AZURE + "2053-11-16 18:17:04,1,1\n", "line 3: .* is no time of this trace"),
        (BURST + "2,-5,1\n", "line 3: '-5' is no number of tokens from 0"),
        (BURST + "2,1.5,1\n", "line 3: '1.5' is no number of tokens"),
        (BURST + "2,nan,1\n", "line 3: 'nan' is no number of tokens"),
        (BURST + "2,many,1\n", "line 3: 'many' is no number"),
        (BURST + "2,1e9,1\n", "line 3: '1e9' is no number of tokens"),
        (BURST + "nan,1,1\n", "line 3: 'nan' is no time"),
        (BURST + "inf,1,1\n", "line 3: 'inf' is no time"),
        ("Timestamp,Request tokens,Response tokens\n-1,1,1\n", "line 2: '-1' is no time"),
        (BURST + f'2,"{"9" * 200_000}",1\n', "field larger than field limit"),
        (MOONCAKE + "[1, 2]\n", "line 2: no object with timestamp, input_length"),
        (MOONCAKE + "{\n", "line 2: no object"),
        (MOONCAKE + "[" * 200_000 + "\n", "line 2: (nested too deeply|no object)"),
        (MOONCAKE + MOONCAKE.replace("1}", "null}"), "line 2: null is no number of tokens"),
        (MOONCAKE + MOONCAKE.replace("1}", "true}"), "line 2: true is no number"),
        (MOONCAKE + MOONCAKE.replace("1}", '["a"]}'), "line 2: a list of 1 is no number"),
        (MOONCAKE + MOONCAKE.replace(": 1,", ": -1,", 1), "line 2: -1 is no time"),
        (MOONCAKE + "x" * 1_000_001, "line 2 is longer than"),
    ],
)
def test_damage_is_one_line_that_says_where(write: Write, text: str, said: str) -> None:
    with refused(SpecError, match=said) as caught:
        list(trace_chunks(write(text)))
    assert len(str(caught.value)) < 400


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="not a file"):
        list(trace_chunks(tmp_path))
    with pytest.raises(SpecError, match="No such file"):
        list(trace_chunks(tmp_path / "absent.csv"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not UTF-8"):
        list(trace_chunks(tmp_path / "binary"))


def test_too_many_rows_are_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MOST_ROWS", 3)
    with pytest.raises(SpecError, match="more than 3 rows; cut the trace"):
        list(trace_chunks(write(BURST + "1,1,1\n" * 3)))


def test_a_long_trace_is_read_in_bounded_memory(write: Write) -> None:
    path = write("Timestamp,Request tokens,Response tokens\n" + "5,1000,100\n" * 300_000)
    chunks = trace_chunks(path)
    total = sum(int(chunk.input_tokens_N.sum()) for chunk in islice(chunks, 3))
    # Tracing costs ten times the reading, so that only one chunk far into the file is traced.
    tracemalloc.start()
    try:
        total += sum(int(chunk.input_tokens_N.sum()) for chunk in islice(chunks, 1))
        held_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    total += sum(int(chunk.input_tokens_N.sum()) for chunk in chunks)
    assert total == 300_000 * 1000
    assert peak_bytes < 40 * 2**20
    assert held_bytes < peak_bytes


def _hashed(*rows: tuple[int, list[int] | None], output: int = 10) -> str:
    named = [
        f'{{"timestamp": {number}, "input_length": {tokens}, "output_length": {output}'
        + ("}" if blocks is None else f', "hash_ids": {blocks}}}')
        for number, (tokens, blocks) in enumerate(rows)
    ]
    return "\n".join(named)


def test_blocks_of_prompts_are_read_on_request(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The two samples of Mooncake's README: 6955 and 6472 tokens in 14 and 13 blocks of 512.
    common = list(range(46, 58))
    text = _hashed((6955, [*common, 2353, 2354]), (0, []), (6472, [*common, 2366]), (100, None))
    path = write(text)
    (plain,) = trace_chunks(path)
    assert plain.blocks is None
    (chunk,) = trace_chunks(path, with_blocks=True)
    assert chunk.failed == 1
    first, second, third = present(chunk.blocks).lists()
    assert first[:12] == second[:12] == common
    assert (len(first), len(second), third) == (14, 13, [])
    monkeypatch.setattr(traces, "CHUNK_BLOCKS", 10)
    split = list(trace_chunks(path, with_blocks=True))
    assert [len(one.input_tokens_N) for one in split] == [1, 1, 1]


@each_row(
    ("blocks", "said"),
    [
        ([1], "line 2: '1 hash_ids' are not one for every 512 tokens of the prompt"),
        ([1, 2, 3, 4], "line 2: '4 hash_ids' are not one for every 512"),
        ([1, 2, -3], "line 2: .* holds an id that is no whole number from 0"),
        ([1, 2, "a"], "line 2: .* holds an id that is no whole number from 0"),
    ],
)
def test_blocks_that_cannot_be_are_refused(write: Write, blocks: list[int], said: str) -> None:
    text = _hashed((1025, [1, 2, 3]), (1025, blocks)).replace("'", '"')
    with pytest.raises(SpecError, match=said):
        list(trace_chunks(write(text), with_blocks=True))
    assert len(list(trace_chunks(write(text)))) == 1


# Summaries: by hand and against closed forms.


def described(path: Path, seed: int = 0) -> TraceSummary:
    return summarise_trace(path, rng=np.random.default_rng(seed))


def burst(rows: Sequence[tuple[float, int, int]]) -> str:
    header = "Timestamp,Request tokens,Response tokens\n"
    return header + "".join(f"{time_s},{one},{two}\n" for time_s, one, two in rows)


@each_row("form", FORMATS.values())
@each_row("chunk_rows", [2, 1000])
def test_a_trace_by_hand(
    form: Form, write: Write, monkeypatch: pytest.MonkeyPatch, chunk_rows: int
) -> None:
    monkeypatch.setattr(traces, "CHUNK_ROWS", chunk_rows)
    rows = [(0.0, 10, 1), (0.25, 20, 2), (0.5, 30, 3), (1.5, 40, 4), (14.5, 50, 5), (15.0, 9, 0)]
    summary = described(write(form(rows)))
    assert summary.requests == 5
    assert summary.span_s == pytest.approx(14.5)
    assert summary.rate_per_s == pytest.approx(4 / 14.5)
    assert sorted(summary.sample_input_N.tolist()) == [10, 20, 30, 40, 50]


def test_the_sample_of_a_long_trace_is_uniform_and_keeps_pairs(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_summary, "SAMPLE_ROWS", 500)
    monkeypatch.setattr(traces, "CHUNK_ROWS", 300)
    path = write(burst([(0.0, number + 1, number + 2) for number in range(5000)]))
    summary = [described(path, seed) for seed in range(20)]
    for one in summary:
        assert len(set(one.sample_input_N.tolist())) == 500
        assert np.array_equal(one.sample_output_N, one.sample_input_N + 1)
    # 10,000 draws of 1..5000: mean 2500.5, its standard error 1443 / 100
    means = np.mean([one.sample_input_N.mean() for one in summary])
    assert means == pytest.approx(2500.5, abs=5 * 14.4)
    early = np.mean([np.count_nonzero(one.sample_input_N <= 500) for one in summary])
    assert early == pytest.approx(50.0, abs=8.0)


def test_equal_seeds_sample_equal_pairs(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_summary, "SAMPLE_ROWS", 10)
    path = write(burst([(0.0, number + 1, 1) for number in range(100)]))
    one, other = described(path, 3), described(path, 3)
    assert np.array_equal(one.sample_input_N, other.sample_input_N)

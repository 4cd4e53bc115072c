import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.expect import refused
from tests.rows import each_row
from tuner.units import (
    format_bytes,
    format_bytes_per_s,
    format_count,
    format_flop_per_s,
    format_ratio,
    format_s,
    parse_bytes,
    parse_bytes_per_s,
    parse_per_s,
    parse_seconds,
    parse_share,
    parse_share_per_s,
)


def test_units_of_bytes_bits_and_events_are_read() -> None:
    assert parse_bytes("1GB") == 1_000_000_000
    assert parse_bytes("1GiB") == 1_073_741_824
    assert parse_bytes_per_s("450GB/s") == 450e9
    assert parse_bytes_per_s("400Gbit/s") == 50e9
    assert parse_bytes_per_s("8bit/s") == 1.0
    assert parse_per_s("20/s") == 20.0
    assert parse_per_s("60/min") == pytest.approx(1.0)


@each_row(
    ("text", "seconds"),
    [
        ("10min", 600.0),
        ("50us", 50e-6),
        ("50000h", 180_000_000.0),
        ("2s", 2.0),
        (" 1.5 d ", 129_600.0),
        ("0s", 0.0),
        ("1e3ms", 1.0),
    ],
)
def test_reads_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


@each_row(
    ("text", "meant"),
    [("10mn", "min"), ("10 Min", "min"), ("3 hours", "h"), ("5sec", "s"), ("5m", "min")],
)
def test_suggests_the_duration_unit_that_was_meant(text: str, meant: str) -> None:
    with refused(ValueError, match=f"unknown unit .*; did you mean '{meant}'"):
        parse_seconds(text)


def test_an_unknown_unit_names_itself_and_its_neighbour() -> None:
    with pytest.raises(ValueError, match="unknown unit") as error:
        parse_seconds("10mn")
    assert str(error.value) == "'10mn': unknown unit 'mn'; did you mean 'min'?"


@each_row(
    ("text", "meant"),
    [("400Gbps", "Gbit/s"), ("400gbit/s", "Gbit/s"), ("80GB", "GB/s"), ("3 mb/s", "MB/s")],
)
def test_suggests_the_bandwidth_unit_that_was_meant(text: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
        parse_bytes_per_s(text)


def test_texts_that_are_no_size_are_refused() -> None:
    with pytest.raises(ValueError, match="known: B, kB, MB"):
        parse_bytes("7 parsecs")
    with pytest.raises(ValueError, match="has no unit; write it like '80GiB'"):
        parse_bytes("80")
    with pytest.raises(ValueError, match="too large"):
        parse_bytes("1e999GB")
    with pytest.raises(ValueError, match="unit") as error:
        parse_bytes("9" * 100_000)
    assert len(str(error.value)) < 200


@each_row("text", ["-5GB", "-0.1GiB"])
def test_refuses_negative_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        parse_bytes(text)


@each_row("text", ["", "GB", "five GB", "1,5GB", "1 2GB", "nan GB", "inf GB", "0x1fB"])
def test_refuses_what_is_no_number(text: str) -> None:
    with pytest.raises(ValueError, match="unit"):
        parse_bytes(text)


@each_row(
    ("written", "expected"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(2**30), "1.00 GiB"),
        (format_bytes(85e9), "79.2 GiB"),
        (format_bytes_per_s(450e9), "450 GB/s"),
        (format_bytes_per_s(999.97e6), "1.00 GB/s"),
        (format_flop_per_s(989e12), "989 TFLOP/s"),
        (format_s(0.0032), "3.20 ms"),
        (format_s(7300), "2.03 h"),
        (format_s(0.0), "0 s"),
        (format_s(math.inf), "inf"),
        (format_count(46_702_792_704), "46.7B"),
        (format_count(8), "8"),
        (format_ratio(0.253), "25.3 %"),
    ],
)
def test_writes_three_digits_in_a_fitting_unit(written: str, expected: str) -> None:
    assert written == expected


@given(st.floats(min_value=1e-9, max_value=1e9))
@settings(deadline=None, max_examples=200)
def test_a_written_duration_reads_back_within_its_digits(time_s: float) -> None:
    assert parse_seconds(format_s(time_s)) == pytest.approx(time_s, rel=0.0051)


@given(st.integers(min_value=1, max_value=2**53))
@settings(deadline=None, max_examples=200)
def test_a_written_size_reads_back_within_its_digits(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.0051, abs=1)


def answer(parse: Callable[[str], float], text: str) -> float | str:
    try:
        return parse(text)
    except ValueError as error:
        return str(error)


@given(st.text(max_size=40))
@settings(deadline=None, max_examples=300)
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    for parse in (parse_bytes, parse_seconds, parse_bytes_per_s, parse_per_s):
        result = answer(parse, text)
        if isinstance(result, str):
            assert len(result.splitlines()) == 1
        else:
            assert 0 <= result < math.inf


def test_weeks_are_read_and_days_are_printed() -> None:
    assert parse_seconds("2w") == 14 * 86400.0
    assert format_s(14 * 86400.0) == "14.0 d"
    with pytest.raises(ValueError, match="did you mean 'w'"):
        parse_seconds("2 weeks")


def test_a_share_of_a_period_is_a_ratio_a_second() -> None:
    week_s = 7 * 86400.0
    wanted = {
        "1% per week": 0.01 / week_s,
        "1 % per week": 0.01 / week_s,
        "1%/w": 0.01 / week_s,
        "1%/7d": 0.01 / week_s,
        "250% per year": 2.5 / (365 * 86400.0),
        ".5% per month": 0.005 / (30 * 86400.0),
        "2e-1% per 10d": 0.002 / (10 * 86400.0),
    }
    assert {text: parse_share_per_s(text) for text in wanted} == pytest.approx(wanted)


@each_row(
    "text",
    ["1%", "1 per week", "1% per", "0% per week", "1% per fortnight", "1% per 0d", "-1% per week"],
)
def test_what_is_no_share_of_a_period_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"1% per week|week|above zero"):
        parse_share_per_s(text)


def test_shares_are_read_as_ratios() -> None:
    texts = {"2%": 0.02, " 0.5 % ": 0.005, "100%": 1.0, ".1%": 0.001}
    assert {text: parse_share(text) for text in texts} == pytest.approx(texts)
    for text in ("2", "%", "two%", "-2%", "2%%", "1e3%", "nan%", "2% per week", "9" * 5000):
        with pytest.raises(ValueError, match="is not a share, such as '2%'"):
            parse_share(text)


def test_a_long_share_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"\.\.\.'"):
        parse_share_per_s("1" * 100_000 + "% per week")

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
    parse_whole,
)

Parse = Callable[[str], float]


@each_row(
    ("parse", "text", "value"),
    [
        (parse_bytes, "1GB", 1_000_000_000),
        (parse_bytes, "1GiB", 1_073_741_824),
        (parse_bytes_per_s, "450GB/s", 450e9),
        (parse_bytes_per_s, "400Gbit/s", 50e9),
        (parse_bytes_per_s, "8bit/s", 1.0),
        (parse_per_s, "20/s", 20.0),
        (parse_per_s, "60/min", 1.0),
        (parse_seconds, "10min", 600.0),
        (parse_seconds, "50us", 50e-6),
        (parse_seconds, "50000h", 180_000_000.0),
        (parse_seconds, "2s", 2.0),
        (parse_seconds, " 1.5 d ", 129_600.0),
        (parse_seconds, "0s", 0.0),
        (parse_seconds, "1e3ms", 1.0),
        (parse_seconds, "2w", 14 * 86400.0),
    ],
)
def test_values_are_read_in_their_units(parse: Parse, text: str, value: float) -> None:
    assert parse(text) == pytest.approx(value, rel=1e-12)


@each_row(
    ("parse", "text", "meant"),
    [
        (parse_seconds, "10mn", "min"),
        (parse_seconds, "10 Min", "min"),
        (parse_seconds, "3 hours", "h"),
        (parse_seconds, "5sec", "s"),
        (parse_seconds, "5m", "min"),
        (parse_seconds, "2 weeks", "w"),
        (parse_bytes_per_s, "400Gbps", "Gbit/s"),
        (parse_bytes_per_s, "400gbit/s", "Gbit/s"),
        (parse_bytes_per_s, "80GB", "GB/s"),
        (parse_bytes_per_s, "3 mb/s", "MB/s"),
    ],
)
def test_suggests_the_unit_that_was_meant(parse: Parse, text: str, meant: str) -> None:
    with refused(ValueError, match=f"unknown unit .*; did you mean '{meant}'"):
        parse(text)


@each_row(
    ("parse", "text", "said"),
    [
        (parse_seconds, "10mn", r"^'10mn': unknown unit 'mn'; did you mean 'min'\?$"),
        (parse_bytes, "7 parsecs", "known: B, kB, MB"),
        (parse_bytes, "80", "has no unit; write it like '80GiB'"),
        (parse_bytes, "1e999GB", "too large"),
        (parse_bytes, "9" * 100_000, "^.{,199}$"),
        *((parse_bytes, text, "must not be negative") for text in ("-5GB", "-0.1GiB")),
        *(
            (parse_bytes, text, "unit")
            for text in ("", "GB", "five GB", "1,5GB", "1 2GB", "nan GB", "inf GB", "0x1fB")
        ),
        *(
            (parse_share_per_s, text, "1% per week|week|above zero")
            for text in ("1%", "1 per week", "1% per", "0% per week", "1% per fortnight")
        ),
        *((parse_share_per_s, text, "week|above zero") for text in ("1% per 0d", "-1% per week")),
        (parse_share_per_s, "1" * 100_000 + "% per week", r"\.\.\.'"),
        *(
            (parse_share, text, "is not a share, such as '2%'")
            for text in ("2", "%", "two%", "-2%", "2%%", "1e3%", "nan%", "2% per week", "9" * 5000)
        ),
    ],
)
def test_what_is_no_value_is_refused_with_the_reason(parse: Parse, text: str, said: str) -> None:
    with refused(ValueError, match=said):
        parse(text)


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
        (format_s(14 * 86400.0), "14.0 d"),
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


def answer(parse: Parse, text: str) -> float | str:
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


def test_shares_are_read_as_ratios() -> None:
    texts = {"2%": 0.02, " 0.5 % ": 0.005, "100%": 1.0, ".1%": 0.001}
    assert {text: parse_share(text) for text in texts} == pytest.approx(texts)


def test_whole_numbers_have_few_digits_and_nothing_else() -> None:
    for text, number in (("64", 64), ("0", 0), ("007", 7), ("9" * 18, 10**18 - 1)):
        assert parse_whole(text) == number
    for text in ("", "-1", "1.0", "1e3", "²", "٣", " 1", "9" * 19, "9" * 5000):
        assert parse_whole(text) is None, text

"""YAML that is short to write and endless to hold."""

import time

import pytest

from tuner.errors import SpecError
from tuner.spec.yaml_text import parse_documents, parse_yaml

DIGITS = "9" * 5000
NEITHER = {
    "a date": "a: 2024-13-45",
    "digits": f"a: {DIGITS}",
    "hexadecimal digits": f"a: 0x{'f' * 5000}",
    "base sixty": f"a: 1:{'59:' * 3000}59",
    "no digits": "a: 0x_",
    "no truth": 'a: !!bool "x"',
    "an object": "a: !!python/object/apply:os.system [id]",
    "depth": "[" * 50_000,
}
FOREIGN = {
    "many of many": f"a: &a [{','.join('1' * 20_000)}]\nb: [{','.join(['*a'] * 20_000)}]",
    "doubled": "a: &x0 [1, 1]\n"
    + "".join(f"x{n}: &x{n} [*x{n - 1}, *x{n - 1}]\n" for n in range(1, 40)),
    "merged into itself": "a: &a\n  b: *a",
}


def test_what_no_machine_holds_or_prints_is_refused_in_a_line() -> None:
    begun_s = time.process_time()
    for cases, parsers in ((NEITHER, (parse_yaml, parse_documents)), (FOREIGN, (parse_documents,))):
        for name, text in cases.items():
            for parse in parsers:
                with pytest.raises(SpecError, match="file: ") as caught:
                    parse(text, source="file")
                assert "\n" not in str(caught.value), name
    assert time.process_time() - begun_s < 60.0


def test_files_of_others_may_have_aliases_and_several_documents() -> None:
    text = "a: &a {b: [1, 2]}\nc:\n  <<: *a\n  d: 1e3\n---\n- on\n"
    assert parse_documents(text, source="file") == [
        {"a": {"b": [1, 2]}, "c": {"b": [1, 2], "d": "1e3"}},
        [True],
    ]
    with pytest.raises(SpecError, match="another document"):
        parse_yaml("a: 1\n---\nb: 2\n", source="file")

"""What CI systems read: JUnit XML, Markdown, GitHub's annotations."""

from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from tuner.regress.annotations import annotations
from tuner.regress.junit import junit_xml
from tuner.regress.markdown import markdown
from tuner.regress.records import (
    FAILING,
    AcceptedChange,
    Check,
    ScenarioResult,
    ScenarioVerdict,
)

REASONS = {verdict: f"because of {verdict.value}" for verdict in ScenarioVerdict}


def checked(**reasons: str) -> Check:
    said = {verdict.value: REASONS[verdict] for verdict in ScenarioVerdict} | reasons
    return Check(
        moetune_version="0.1.0",
        scenarios=tuple(
            ScenarioResult(
                name=f"a-{name}",
                kind="train",
                verdict=ScenarioVerdict(name),
                reason=reason,
                changes=(AcceptedChange(what="step_time_s", accepted=1.0, found=2.0, ratio=2.0),),
                cpu_s=1.5,
                file=f"checks/a-{name}/spec.yaml",
            )
            for name, reason in said.items()
        ),
    )


def test_junit_counts_failures_and_errors_separately() -> None:
    suites = ElementTree.fromstring(junit_xml(checked()))
    assert (suites.get("tests"), suites.get("failures"), suites.get("errors")) == ("7", "3", "1")
    (suite,) = suites
    failed = {case.get("name") for case in suite if case.find("failure") is not None}
    assert failed == {"a-regression", "a-incomparable", "a-missing"}
    (error,) = (case for case in suite if case.find("error") is not None)
    assert error.get("name") == "a-error"
    first = suite[0]
    assert (first.get("time"), first.get("classname")) == ("1.500", "moetune.train")
    drift = next(case for case in suite if case.get("name") == "a-drift")
    assert drift.findtext("system-out") == "drift: because of drift"


@settings(deadline=None, max_examples=50)
@given(st.text())
def test_junit_holds_any_reason(reason: str) -> None:
    text = junit_xml(checked(regression=reason))
    (failure,) = ElementTree.fromstring(text).iterfind(".//failure[@type='regression']")
    assert len(failure.get("message", "")) == len(reason)


def test_markdown_lists_what_fails_first_and_what_passes_last() -> None:
    text = markdown(checked())
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| a")]
    assert rows[-1] == r"a\-pass"
    assert set(rows[:4]) == {rf"a\-{verdict.value}" for verdict in FAILING}
    assert text.startswith("## moetune check: failed\n")
    assert "**regression**" in text


@each_row(
    "reason",
    [
        "a|b",
        "line\nbreak",
        "<script>alert(1)</script>",
        "[x](http://y)",
        "@someone `code` **b**",
        "see HTTPS://evil.example or WWW.evil.example for $x$",
    ],
)
def test_markdown_lets_no_reason_become_markup(reason: str) -> None:
    text = markdown(checked(regression=reason))
    (row,) = (line for line in text.splitlines() if line.startswith(r"| a\-regression"))
    assert row.replace(r"\|", "").count("|") == 4
    cell = row.replace("**regression**", "").replace("\\*", "").replace("\\`", "")
    for markup in ("<script", "](", "`", "**", "@someone", "://", "www.", " $"):
        assert markup not in cell.lower()


def test_annotations_escape_what_ends_a_line_or_a_property() -> None:
    lines = annotations(checked(regression="100 % slower\nthan before: a, b"))
    assert len(lines) == len(ScenarioVerdict) - 1
    (line,) = (line for line in lines if "regression" in line)
    assert line == (
        "::error file=checks/a-regression/spec.yaml,title=moetune check%3A a-regression%3A"
        " regression::100 %25 slower%0Athan before: a, b"
    )
    assert any(line.startswith("::warning") and "drift" in line for line in lines)
    assert any(line.startswith("::notice") and "better" in line for line in lines)


def test_a_property_cannot_be_ended_by_a_name() -> None:
    result = ScenarioResult(
        name="a,title=b::c", kind="", verdict=ScenarioVerdict.ERROR, reason="r", file="x,y:z"
    )
    (line,) = annotations(Check(moetune_version="0", scenarios=(result,)))
    assert line.startswith("::error file=x%2Cy%3Az,title=moetune check%3A a%2Ctitle=b%3A%3Ac%3A")

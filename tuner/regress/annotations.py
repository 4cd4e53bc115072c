"""A check as GitHub's workflow commands: lines that become annotations of a pull request.

Format: docs.github.com, "Workflow commands for GitHub Actions": `::error file=F,title=T::message`;
percent signs, line ends and, in properties, colons and commas are written as percent codes.
"""

from tuner.regress.records import FAILING, Check, ScenarioResult, ScenarioVerdict

LEVELS = {ScenarioVerdict.DRIFT: "warning", ScenarioVerdict.BETTER: "notice"}
"""Annotation levels of verdicts that do not fail; a pass is not annotated."""


def annotations(check: Check) -> tuple[str, ...]:
    """Return one line for every scenario that does not pass."""
    return tuple(
        _line(result) for result in check.scenarios if result.verdict is not ScenarioVerdict.PASS
    )


def _line(result: ScenarioResult) -> str:
    level = "error" if result.verdict in FAILING else LEVELS[result.verdict]
    title = _property(f"moetune check: {result.name}: {result.verdict.value}")
    file = f"file={_property(result.file)}," if result.file else ""
    return f"::{level} {file}title={title}::{_message(result.reason)}"


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")

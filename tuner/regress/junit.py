"""A check as JUnit XML, which CI systems display per test.

Format: the `testsuites` of Jenkins' junit-10.xsd, which GitHub actions and GitLab read as well:
`failure` for what fails the check, `error` for what could not be checked, `system-out` for what
is only reported.
"""

import re
from typing import Final
from xml.etree import ElementTree

from tuner.regress.records import FAILING, Check, ScenarioResult, ScenarioVerdict

_NO_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold."""


def junit_xml(check: Check) -> str:
    """Return the file."""
    verdicts = [scenario.verdict for scenario in check.scenarios]
    counts = {
        "tests": str(len(verdicts)),
        "failures": str(
            sum(verdict in FAILING and verdict is not ScenarioVerdict.ERROR for verdict in verdicts)
        ),
        "errors": str(verdicts.count(ScenarioVerdict.ERROR)),
    }
    suites = ElementTree.Element("testsuites", {"name": "moetune check", **counts})
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "moetune check", **counts})
    for result in check.scenarios:
        _case(suite, result)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=False) + "\n"


def _case(suite: ElementTree.Element, result: ScenarioResult) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        {
            "name": _text(result.name),
            "classname": f"moetune.{result.kind or 'check'}",
            "file": _text(result.file),
            "time": f"{result.cpu_s or 0.0:.3f}",
        },
    )
    reason = _text(result.reason)
    if result.verdict in FAILING:
        tag = "error" if result.verdict is ScenarioVerdict.ERROR else "failure"
        message = {"message": reason, "type": result.verdict.value}
        failed = ElementTree.SubElement(case, tag, message)
        failed.text = _text(
            "\n".join(
                f"{change.what}: {change.accepted} -> {change.found}" for change in result.changes
            )
        )
    else:
        ElementTree.SubElement(case, "system-out").text = f"{result.verdict.value}: {reason}"


def _text(text: str) -> str:
    return _NO_XML.sub("?", text)

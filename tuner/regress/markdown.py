"""A check as Markdown, for a pull request or the summary of a CI run.

Names and reasons may hold anything a spec or an error holds, so they are escaped: nothing in them
becomes markup, a link or a mention.
"""

import re
from typing import Final

from tuner.regress.records import FAILING, Check, ScenarioResult, ScenarioVerdict
from tuner.units import format_counted

_MARKUP: Final = re.compile(r"([\\`*_{}\[\]()#+!|~$-])")
_LINKED: Final = re.compile(r"(@|:(?=//)|www(?=\.))", re.IGNORECASE)
"""Text that GitHub turns into a mention or a link without any mark around it, once escapes are
undone; a space of no width behind it prevents that."""
LONGEST_CELL: Final = 600


def markdown(check: Check) -> str:
    """Return a headline and a table, failures first."""
    counts = ", ".join(f"{count} {name}" for name, count in check.counts().items())
    against = f", against {_escaped(check.against)}" if check.against else ""
    lines = [
        f"## moetune check: {'failed' if check.failed else 'passed'}",
        "",
        f"{format_counted(len(check.scenarios), 'scenario')}{against}: {counts or 'none'}",
        "",
        "| scenario | verdict | reason |",
        "|---|---|---|",
    ]
    lines += [_row(result) for result in sorted(check.scenarios, key=_severity)]
    return "\n".join(lines) + "\n"


def _severity(result: ScenarioResult) -> tuple[bool, bool]:
    return result.verdict not in FAILING, result.verdict is ScenarioVerdict.PASS


def _row(result: ScenarioResult) -> str:
    verdict = result.verdict.value
    shown = f"**{verdict}**" if result.verdict in FAILING else verdict
    return f"| {_escaped(result.name)} | {shown} | {_escaped(result.reason)} |"


def _escaped(text: str) -> str:
    flat = " ".join(text.split())
    short = flat if len(flat) <= LONGEST_CELL else f"{flat[: LONGEST_CELL - 3]}..."
    entities = short.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _LINKED.sub("\\1\u200b", _MARKUP.sub(r"\\\1", entities))

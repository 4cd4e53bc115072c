"""Puts extreme numbers into every number of the example specs.

    python -m tests.fuzz.extremes [NAME ...]        of examples/checks; all by default

One number of one spec at a time: `plan --time-limit 1s` must end within the limits of run.py, with
a plan, without one, or with a refusal in one line.
"""

import copy
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from tests.benchmarks.bars import say
from tests.fuzz.inputs import EXAMPLES, LIMIT, Kind
from tests.fuzz.run import Worker, _run

WHOLE: Final = (2**31, 10**15, 100_000)
FRACTIONS: Final = (1e15, 1e-9)
QUANTITIES: Final = ("1000000000", "0.000000001")
"""In place of the number of `80GiB` or `5/s`."""

Place = tuple[str | int, ...]


def numbers(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield every number of a spec with its replacements."""
    if isinstance(value, dict | list):
        for key, own in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(own, (*place, key))
    elif isinstance(value, bool) or place == ("schema_version",):
        return
    elif isinstance(value, int | float):
        yield from ((place, one) for one in (WHOLE if isinstance(value, int) else FRACTIONS))
    elif isinstance(value, str) and (unit := re.fullmatch(r"[0-9.]+(\D.*)", value)):
        yield from ((place, f"{one}{unit[1]}") for one in QUANTITIES)


def replaced(spec: Any, place: Place, value: Any) -> Any:
    """Return the spec with another value at a place."""
    changed = copy.deepcopy(spec)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed


def absolute(value: Any, folder: Path) -> Any:
    """Return a spec with absolute paths."""
    if isinstance(value, dict):
        return {key: absolute(own, folder) for key, own in value.items()}
    if isinstance(value, list):
        return [absolute(own, folder) for own in value]
    if isinstance(value, str) and ("/" in value or "." in value) and (folder / value).exists():
        return str((folder / value).resolve())
    return value


def main(names: list[str]) -> int:
    """Run all; return 1 on any failure."""
    runs = finds = 0
    with tempfile.TemporaryDirectory(prefix="moetune-extremes-") as scratch, Worker() as worker:
        base, place = Path(scratch) / "base", Path(scratch) / "case"
        (base / "spec").mkdir(parents=True)
        kind = Kind(name="spec", folder="spec")
        command = ("plan", "{in}/spec.yaml", "-o", "{out}", *LIMIT)
        for file in sorted((EXAMPLES / "checks").glob("*/spec.yaml")):
            if names and file.parent.name not in names:
                continue
            spec = absolute(yaml.safe_load(file.read_text()), file.parent)
            for where, value in numbers(spec):
                changed = yaml.safe_dump(replaced(spec, where, value))
                (base / "spec" / "spec.yaml").write_text(changed)
                result = _run(kind, command, "", base=base, place=place, worker=worker)
                runs += 1
                if result["wrong"]:
                    finds += 1
                    say(json.dumps(result | {"how": f"{file.parent.name} {where}: {value}"}))
    say(json.dumps({"runs": runs, "finds": finds}))
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

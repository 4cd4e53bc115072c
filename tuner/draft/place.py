"""The simple spec of an expert placement."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from profilers.routing.store import read_recording
from tuner.draft.draft import (
    HEAD,
    Draft,
    FieldValues,
    SpecField,
    check_one_of,
    check_whole,
    list_text,
    parse_targets,
    path_text,
    quoted,
)
from tuner.engines.placement.targets import PLACE_TARGETS
from tuner.errors import SpecError
from tuner.goals.place_spec import read_place_spec
from tuner.spec.files import home_expanded, shown_value
from tuner.spec.place import MOST_RANKS, Objective


def parse_workloads(text: str) -> dict[str, Path]:
    """Read `chat=routing/chat,code=routing/code`.

    Raises:
        SpecError: a part is no name and path, or a name comes twice.
    """
    paths: dict[str, Path] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, path = part.partition("=")
        if not (name and equals and path):
            raise SpecError(f"--workload: {shown_value(part)} is not NAME=PATH of a recording")
        if name in paths:
            raise SpecError(f"--workload: two are named {name!r}; give each its own name")
        paths[name] = Path(path)
    if not paths:
        raise SpecError("--workload: name at least one recording, NAME=PATH")
    return paths


def _emit_placement(text: str, values: FieldValues) -> None:
    for name in parse_targets(text):
        check_one_of("emit", tuple(PLACE_TARGETS))(name, values)


def _workloads(text: str, _values: FieldValues) -> None:
    for path in parse_workloads(text).values():
        read_recording(home_expanded(path))


def _lines(values: FieldValues, folder: Path | None) -> Iterator[str]:
    yield HEAD.format(schema="place-spec")
    yield "schema_version: 1"
    yield "goal:"
    yield "  kind: place"
    yield f"  objective: {values['objective']}"
    yield f"  ranks: {values['ranks']}"
    if values["ranks-per-node"]:
        yield f"  ranks_per_node: {values['ranks-per-node']}"
    if values["redundant-experts"]:
        yield f"  redundant_experts: {values['redundant-experts']}"
    yield "  robust: mean                      # of the workloads' imbalances; or worst, cvar"
    yield "  workloads:"
    for name, path in parse_workloads(values["workload"]).items():
        yield f"    - {{name: {quoted(name)}, path: {path_text(str(path), folder)}, weight: 1}}"
    yield "  # current: running.json           # what runs today; with max_moved_experts"
    yield f"emit: {list_text(values['emit'])}"


_FIELDS: Final = (
    SpecField(
        key="workload",
        default=None,
        check=_workloads,
    ),
    SpecField(
        key="ranks",
        default=None,
        check=check_whole("ranks", largest=MOST_RANKS),
    ),
    SpecField(
        key="ranks-per-node",
        default="",
        check=check_whole("ranks-per-node", largest=MOST_RANKS),
    ),
    SpecField(
        key="redundant-experts",
        default="",
        check=check_whole("redundant-experts", least=0, largest=100_000),
    ),
    SpecField(
        key="objective",
        default="balance",
        # The other objectives need a model and machines, which are no fields here.
        check=check_one_of("objective", tuple(objective.value for objective in Objective)[:3]),
    ),
    SpecField(key="emit", default="eplb", check=_emit_placement),
)
DRAFT: Final = Draft(kind="place", fields=_FIELDS, lines=_lines, check=read_place_spec)

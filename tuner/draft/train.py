"""The simple spec of a training run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tuner.draft.draft import (
    HEAD,
    MACHINES,
    MODEL,
    Draft,
    FieldValues,
    SpecField,
    check_one_of,
    check_whole,
    cluster_lines,
    list_text,
    parse_targets,
    path_text,
)
from tuner.engines.targets import TARGETS, programs
from tuner.errors import SpecError
from tuner.goals.train_plan import refuse_unlaunchable
from tuner.goals.train_spec import read_spec
from tuner.spec.goal import Precision


def _emit_training(text: str, _values: FieldValues) -> None:
    programs(parse_targets(text)).capabilities()
    if not parse_targets(text):
        raise SpecError(f"--emit: name at least one of {', '.join(TARGETS)}")


def _lines(values: FieldValues, folder: Path | None) -> Iterator[str]:
    yield HEAD.format(schema="spec")
    yield "schema_version: 1"
    yield f"model: {path_text(values['model'], folder)}"
    yield from cluster_lines(values)
    yield "goal:"
    yield "  kind: train"
    yield f"  sequence_length: {values['sequence-length']}"
    yield f"  global_batch_size: {values['batch']}          # sequences of one optimizer step"
    yield f"  precision: {values['precision']}"
    yield "  # tokens: 1.0e12                # of the whole run: its days, device hours and cost"
    yield "  # routing: {path: routing.json}  # recorded loads of experts; absent: balanced"
    yield "  # moe_aux_loss_coeff: 0.001     # changes the loss; absent: not written"
    yield "  # reliability: {nodes_lost: 1% per week, restart: 10min}  # or device_mtbf: 50000h"
    yield f"emit: {list_text(values['emit'])}      # targets also limit what is searched"


def _check(path: Path) -> None:
    refuse_unlaunchable(read_spec(path))


_FIELDS: Final = (
    MODEL,
    *MACHINES,
    SpecField(
        key="sequence-length",
        default="4096",
        check=check_whole("sequence-length"),
    ),
    SpecField(
        key="batch",
        default="256",
        check=check_whole("batch"),
    ),
    SpecField(
        key="precision",
        default="bf16",
        check=check_one_of("precision", tuple(precision.value for precision in Precision)),
    ),
    SpecField(key="emit", default="megatron-lm", check=_emit_training),
)
DRAFT: Final = Draft(kind="train", fields=_FIELDS, lines=_lines, check=_check)

"""The commented YAML of a simple spec."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tuner.devices.catalogue import find_device
from tuner.draft.spec_fields import (
    FieldValues,
    Goal,
    parse_engine,
    parse_targets,
    parse_workloads,
    split_into_nodes,
)
from tuner.spec.files import home_expanded

_HEAD: Final = (
    "# `moetune plan` reads this file; `moetune schema {schema}` lists all of its fields."
)


def spec_text(goal: Goal, values: FieldValues, *, folder: Path | None) -> str:
    """Return the text of a spec.

    Args:
        goal: what the spec is for.
        values: of every field of the goal, checked.
        folder: that the file will lie in, which its paths are made relative to; None: absolute.
    """
    lines = {"train": _train, "serve": _serve, "place": _place}[goal](values, folder)
    return "\n".join(lines) + "\n"


def _train(values: FieldValues, folder: Path | None) -> Iterator[str]:
    yield _HEAD.format(schema="spec")
    yield "schema_version: 1"
    yield f"model: {_path(values['model'], folder)}"
    yield from _cluster(values)
    yield "goal:"
    yield "  kind: train"
    yield f"  sequence_length: {values['sequence-length']}"
    yield f"  global_batch_size: {values['batch']}          # sequences of one optimizer step"
    yield f"  precision: {values['precision']}"
    yield "  # tokens: 1.0e12                # of the whole run: its days, device hours and cost"
    yield "  # routing: {path: routing.json}  # recorded loads of experts; absent: balanced"
    yield "  # moe_aux_loss_coeff: 0.001     # changes the loss; absent: not written"
    yield "  # reliability: {nodes_lost: 1% per week, restart: 10min}  # or device_mtbf: 50000h"
    yield f"emit: {_list(values['emit'])}      # targets also limit what is searched"


def _serve(values: FieldValues, folder: Path | None) -> Iterator[str]:
    yield _HEAD.format(schema="serve-spec")
    yield "schema_version: 1"
    yield f"model: {_path(values['model'], folder)}"
    yield from _cluster(values)
    yield "goal:"
    yield "  kind: serve"
    engine = parse_engine(values["engine"])
    version = f', version: "{engine.version}"' if engine.version else ""
    yield f"  engine: {{name: {engine.name}{version}}}"
    yield "  traffic:                          # or a recorded trace, or length distributions"
    load = "concurrency" if values["concurrency"] else "rate"
    yield f"    {load}: {values[load]}"
    yield f"    input_tokens: {values['input-tokens']}"
    yield f"    output_tokens: {values['output-tokens']}"
    yield "  slo:                              # mean, p50, p90, p99"
    yield f"    ttft: {{p90: {values['ttft']}}}"
    yield f"    tpot: {{p90: {values['tpot']}}}"
    yield f"  quantization: {values['quantization']}               # of the weights"
    yield f"  objective: {values['objective']}              # goodput | cost | devices | rate"
    yield f"emit: {_list(values['emit'])}"


def _place(values: FieldValues, folder: Path | None) -> Iterator[str]:
    yield _HEAD.format(schema="place-spec")
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
        yield f"    - {{name: {_quoted(name)}, path: {_path(str(path), folder)}, weight: 1}}"
    yield "  # current: running.json           # what runs today; with max_moved_experts"
    yield f"emit: {_list(values['emit'])}"


def _cluster(values: FieldValues) -> Iterator[str]:
    sheet = find_device(values["device"])
    nodes, each = split_into_nodes(values)
    yield "cluster:"
    yield "  pools:"
    yield f"    - name: {_quoted(sheet.name)}"
    yield f"      device: {_quoted(sheet.name)}           # its datasheet; or  profile: DIR"
    yield f"      nodes: {nodes}"
    yield f"      devices_per_node: {each}"
    yield "      # nic: 400Gbit/s              # of one network card; absent: the datasheet's"
    yield "      # price_per_device_hour: 3.5"
    yield "  # currency: USD                  # of the prices"


def _path(text: str, folder: Path | None) -> str:
    path = home_expanded(text).absolute()
    if folder is None:
        return _quoted(str(path))
    return _quoted(Path(os.path.relpath(path, folder.absolute())).as_posix())


def _list(text: str) -> str:
    return f"[{', '.join(_quoted(name) for name in parse_targets(text))}]"


def _quoted(text: str) -> str:
    """Write text as YAML that reads back the same; plain where that is safe."""
    is_plain = text.replace("-", "").replace("_", "").isalnum() and text[:1].isalpha()
    is_plain &= text.isascii() and text.lower() not in _WORDS
    return text if is_plain else json.dumps(text, ensure_ascii=False)


_WORDS: Final = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
"""That YAML reads as something else than text."""

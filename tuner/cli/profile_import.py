"""`moetune profile import`: convert measurements and recordings of other tools."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tuner.cli.text import print_exact, print_result, print_stderr, print_text
from tuner.errors import TunerError
from tuner.spec.files import shown_path

if TYPE_CHECKING:
    from profilers.records import ProfileHeader


MOST_LAYERS: Final = 10_000


def run(
    kind: Annotated[
        str,
        typer.Argument(
            help="Source format: aiconfigurator, nccl-tests; routing, or one of its formats:"
            " routing-json, sglang, trtllm, megatron-trace, vllm-ascend, eplb, stored."
        ),
    ],
    path: Annotated[
        Path | None,
        typer.Argument(
            help="Its folder or file; without one, an installed aiconfigurator-core.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Folder of the profile or recording.", show_default=False),
    ] = ...,  # type: ignore[assignment]  # marks a required option for typer
    system: Annotated[str, typer.Option(help="aiconfigurator: the system, e.g. h200_sxm.")] = "",
    framework: Annotated[
        str,
        typer.Option(
            "--framework",
            "--engine",
            help="aiconfigurator: the engine whose kernels to import, e.g. trtllm; default: all,"
            " one profile in a folder each.",
        ),
    ] = "",
    operations: Annotated[
        str, typer.Option(help="aiconfigurator: comma-separated tables to keep; default all.")
    ] = "",
    collective: Annotated[
        str, typer.Option(help="nccl-tests: the collective, if the file does not name it.")
    ] = "",
    workload: Annotated[str, typer.Option(help="routing: name of the workload.")] = "",
    model: Annotated[str, typer.Option(help="routing: the model that was recorded.")] = "",
    layer_ids: Annotated[
        str, typer.Option(help="routing: absolute layer numbers of the rows, e.g. 3-60.")
    ] = "",
    top_k: Annotated[
        int | None, typer.Option(min=1, help="routing: experts per token.", show_default=False)
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option(min=1, help="megatron-trace: experts per layer.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Import measurements or routing recordings of other tools."""
    from profilers.imports.registry import is_routing

    measured = {
        "system": system,
        "framework": framework,
        "operations": operations,
        "collective": collective,
    }
    recorded = {
        "workload": workload,
        "model": model,
        "layer-ids": layer_ids,
        "top-k": str(top_k or ""),
        "experts": str(experts or ""),
    }
    strange = measured if is_routing(kind) else recorded
    if named := [name for name, value in strange.items() if value]:
        raise TunerError(f"{kind} has no option {named[0]!r}; see moetune profile import --help")
    if not is_routing(kind):
        _profile(kind, path, out, options=measured, as_json=as_json)
        return

    import_recording(
        kind,
        path,
        out,
        workload=workload,
        model=model,
        layer_ids=read_layer_ids(layer_ids),
        top_k=top_k,
        num_experts=experts,
    )
    print_recording(out, as_json=as_json)
    print_stderr(f"recording: {out}")


def _profile(
    kind: str, path: Path | None, out: Path, *, options: Mapping[str, str], as_json: bool
) -> None:
    from profilers.errors import ProfileUnreadableError
    from profilers.imports.registry import softwares_of

    stated = {name: value for name, value in options.items() if value}
    softwares = softwares_of(kind, path, options=stated)
    if len(softwares) < 2:
        _show([_stored(kind, path, out, options=stated)], as_json=as_json)
        return
    headers, reasons = [], []
    for software in softwares:
        try:
            software_options = stated | {"framework": software}
            headers.append(_stored(kind, path, out / software, options=software_options))
        except ProfileUnreadableError as error:
            reasons.append(str(error))
    if not headers:
        raise ProfileUnreadableError(reasons[0])
    for reason in reasons:
        print_stderr(f"left out: {reason}")
    _show(headers, as_json=as_json)
    print_stderr(f"{len(headers)} profiles in {shown_path(out)}: name those to use with --profile")


def _stored(
    kind: str, path: Path | None, out: Path, *, options: Mapping[str, str]
) -> "ProfileHeader":
    """Import one profile, and store it.

    Raises:
        UnknownDeviceError: kernels of a device that no plan could use.
    """
    from datetime import UTC, datetime

    from profilers.imports.registry import import_measurements
    from profilers.store import write_profile
    from tuner.devices.catalogue import device_of

    created = datetime.now(UTC).isoformat(timespec="seconds")
    imported = import_measurements(kind, path, options=options, created=created)
    if kind == "aiconfigurator":
        device_of(imported.profile.header.machine)
    write_profile(out, imported.profile)
    for line in imported.left_out:
        print_stderr(f"left out: {line}")
    return imported.profile.header


def _show(headers: "list[ProfileHeader]", *, as_json: bool) -> None:
    from tuner.cli.profile_text import summary_text

    if as_json:
        one_by_one = ",\n".join(header.model_dump_json(indent=2) for header in headers)
        print_exact(one_by_one if len(headers) == 1 else f"[{one_by_one}]")
        return
    for header in headers:
        print_text(summary_text(header))


def import_recording(kind: str, path: Path | None, out: Path, **stated: Any) -> None:
    """Read a dump into a stored recording; `stated` goes before what the dump says."""
    from datetime import UTC, datetime

    from profilers.imports.registry import ROUTING
    from profilers.routing.formats import read_as, recognised
    from profilers.routing.store import write_recording

    if path is None:
        raise TunerError(
            f"{kind} needs the path of a recording: moetune profile import {kind} PATH"
        )
    kind = recognised(path) if kind == ROUTING else kind
    recording = read_as(kind, path, **stated)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    write_recording(out, recording, origin=f"imported as {kind}", created=created)


def read_layer_ids(text: str) -> tuple[int, ...]:
    """Read `3-60` or `0,7,15`."""
    ids: list[int] = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"\s*(\d{1,5})(?:\s*-\s*(\d{1,5}))?\s*", part, re.ASCII)
        if match is None or int(match.group(2) or match.group(1)) >= MOST_LAYERS:
            raise TunerError(f"--layer-ids: {part[:40]!r} is no layer, nor a range such as 3-60")
        ids += range(int(match.group(1)), int(match.group(2) or match.group(1)) + 1)
    return tuple(ids)


def print_recording(path: Path, *, as_json: bool) -> None:
    """Print a stored recording, for people with the skew of its layers."""
    from profilers.routing.skew import skew
    from profilers.routing.store import read, read_header
    from tuner.cli.printed import ShownRecording
    from tuner.cli.profile_text import recording_text

    recording = read(path)
    shown = ShownRecording(
        **dict(read_header(path)),
        token_copies=int(recording.count_PLE.sum()),
        skew=skew(recording),
    )
    print_result(shown, recording_text, as_json=as_json)

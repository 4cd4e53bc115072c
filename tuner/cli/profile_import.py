"""`moetune profile import`: convert measurements and recordings of other tools."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli import profile_routing
from tuner.cli.text import print_exact, print_stderr, print_text
from tuner.errors import TunerError
from tuner.spec.files import shown_path

if TYPE_CHECKING:
    from profilers.records import ProfileHeader


def run(
    kind: Annotated[
        str,
        typer.Argument(
            help="Source format: aiconfigurator, nccl-tests; routing, or one of its formats:"
            " routing-json, sglang, trtllm, megatron-trace, vllm-ascend, eplb."
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

    profile_routing.import_recording(
        kind,
        path,
        out,
        workload=workload,
        model=model,
        layer_ids=profile_routing.layer_ids(layer_ids),
        top_k=top_k,
        num_experts=experts,
    )
    profile_routing.print_recording(out, as_object=as_json)
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
            own = stated | {"framework": software}
            headers.append(_stored(kind, path, out / software, options=own))
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
    from tuner.cli.profile import summary

    if as_json:
        one_by_one = ",\n".join(header.model_dump_json(indent=2) for header in headers)
        print_exact(one_by_one if len(headers) == 1 else f"[{one_by_one}]")
        return
    for header in headers:
        print_text(summary(header))

"""`moetune profile import`: read measurements that others took into a stored profile."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def run(
    kind: Annotated[str, typer.Argument(help="What to read: aiconfigurator or nccl-tests.")],
    path: Annotated[
        Path | None,
        typer.Argument(
            help="Its folder or file; without one, an installed aiconfigurator-core.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of the profile.", show_default=False)
    ] = ...,  # type: ignore[assignment]  # typer's way to say that an option is required
    system: Annotated[str, typer.Option(help="aiconfigurator: the system, e.g. h200_sxm.")] = "",
    framework: Annotated[
        str, typer.Option(help="aiconfigurator: the framework whose kernels count, e.g. trtllm.")
    ] = "",
    operations: Annotated[
        str, typer.Option(help="aiconfigurator: comma-separated tables to keep; default all.")
    ] = "",
    collective: Annotated[
        str, typer.Option(help="nccl-tests: what was run, where the file does not say it.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read measurements that others took into a stored profile."""
    from datetime import UTC, datetime

    from profilers.imports.registry import import_measurements
    from profilers.store import write_profile
    from tuner.cli.profile import summary

    said = {
        "system": system,
        "framework": framework,
        "operations": operations,
        "collective": collective,
    }
    imported = import_measurements(
        kind,
        path,
        options={name: value for name, value in said.items() if value},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_profile(out, imported.profile)
    for line in imported.left_out:
        print(f"left out: {line}", file=sys.stderr)
    header = imported.profile.header
    print(header.model_dump_json(indent=2) if as_json else summary(header))

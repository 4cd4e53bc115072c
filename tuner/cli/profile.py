"""`moetune profile`: measure this machine, `show`, `diff` or `import` a stored profile."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tuner.cli import profile_import
from tuner.cli.text import print_exact, print_result, print_stderr, print_text
from tuner.errors import TunerError
from tuner.output import write_csv

if TYPE_CHECKING:
    from profilers.records import Profile
    from tuner.prices.lookups import WantedSizes

app = typer.Typer(rich_markup_mode=None)
app.command("import")(profile_import.run)

ROUTING: Final = "routing"
"""A former suite, which recorded a model on text."""
"""The suite that launches the engine of a spec that serves."""

CASE_TYPES: Final = {
    **{"case": "string", "rank": "int64", "median_s": "float64", "repeats": "int64"},
    **dict.fromkeys(("status", "error", "source"), "string"),
}
"""Columns of `show --csv`."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback(invoke_without_command=True)
def measure(
    context: typer.Context,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder of the profile.",
            show_default=False,
            metavar="PATH",
        ),
    ] = None,
    suite: Annotated[
        str,
        typer.Option(
            help="Comma-separated: kernels, links, storage, kv, engine (needs --for and"
            " --command); default the first four."
        ),
    ] = "",
    budget: Annotated[str, typer.Option(help="Target time, with its unit.")] = "60s",
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes to start; default one per accelerator, or one. Not under torchrun,"
            " srun or mpirun: their ranks are used.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Keep complete tables.")] = False,
    spec: Annotated[
        Path | None,
        typer.Option(
            "--for", help="A spec whose exact sizes are measured too.", show_default=False
        ),
    ] = None,
    command: Annotated[
        str,
        typer.Option(
            help="engine: starts one instance from emitted files, e.g. 'bash {launch}/local.sh'."
        ),
    ] = "",
    url: Annotated[
        str, typer.Option(help="engine: where it answers; default: as local.sh starts it.")
    ] = "",
    start_limit: Annotated[str, typer.Option(help="engine: longest start-up.")] = "15min",
    as_json: AsJson = False,
    of_routing: Annotated[
        list[str] | None,
        typer.Option(
            *("--model", "--text", "--workload", "--sequence", "--batch", "--passes"),
            hidden=True,
            help="Former: options of --suite routing.",
        ),
    ] = None,
) -> None:
    """Measure this machine and its engine.

    Suites: kernels, links, storage and KV transfers; the steps of an engine.
    """
    if context.invoked_subcommand is not None:
        return
    if out is None:
        raise TunerError("--out is missing: say where to write, moetune profile -o FOLDER")

    from profilers.registry import ENGINE, SUITES

    names = tuple(name.strip() for name in suite.split(",") if name.strip()) or tuple(SUITES)
    if ROUTING in names or of_routing:
        raise TunerError(
            "--suite routing records no more: let the engine record its own traffic, and read that"
            " with moetune profile import routing"
        )
    measured = tuple(name for name in names if name != ENGINE)
    _refuse_unused(has_engine=ENGINE in names, spec=spec, command=command, url=url)
    if measured:
        _measure(
            out,
            suites=measured,
            budget=budget,
            ranks=ranks,
            resume=resume,
            spec=spec,
            as_json=as_json,
        )
    if spec is not None and ENGINE in names:
        _measure_engine(out, spec, command=command, url=url, start_limit=start_limit)


def _measure(
    out: Path,
    *,
    suites: tuple[str, ...],
    budget: str,
    ranks: int | None,
    resume: bool,
    spec: Path | None,
    as_json: bool,
) -> None:
    from profilers.ranks import from_environment
    from profilers.session import measure_profile
    from tuner.cli.options import seconds
    from tuner.cli.profile_text import summary_text
    from tuner.cli.progress import measurement_progress
    from tuner.costs.serve.engine_steps import drop_engine_steps

    budget_s = seconds(budget, option="--budget")
    # The first rank of a job says what the others measure.
    is_first = from_environment(os.environ).rank == 0
    wanted = _wanted_sizes(spec) if spec is not None and is_first else None
    with measurement_progress() as progress:
        header = measure_profile(
            out,
            suites=suites,
            budget_s=budget_s,
            ranks=ranks,
            resume=resume,
            extra_cases=() if wanted is None else wanted.cases,
            progress=progress,
        )
    # In a job of several ranks only the first one prints.
    if header is None:
        return
    if not resume:
        # Steps of an engine belong to the measurement that they were priced on.
        drop_engine_steps(out)
    print_result(header, summary_text, as_json=as_json)
    if wanted is not None and not wanted.cases:
        print_stderr(f"{spec}: planning it prices no kernels")
    if wanted is not None and wanted.unmeasured:
        names = ", ".join(wanted.unmeasured)
        print_stderr(f"not measured here, so the datasheet or imported tables price it: {names}")


def _refuse_unused(*, has_engine: bool, spec: Path | None, command: str, url: str) -> None:
    if has_engine and (spec is None or not command):
        raise TunerError(
            "--suite engine needs --for, a spec that serves, and --command, which starts it, such"
            " as 'bash {launch}/local.sh'"
        )
    if not has_engine and (command or url):
        raise TunerError("--command and --url are for --suite engine, which is not selected")


def _measure_engine(out: Path, spec: Path, *, command: str, url: str, start_limit: str) -> None:
    from profilers.ranks import from_environment
    from tuner.cli.options import seconds
    from tuner.goals.engine_profile import profile_engine

    # The first rank of a job starts the engine.
    if from_environment(os.environ).rank != 0:
        return
    steps = profile_engine(
        out,
        spec,
        command=command,
        url=url,
        start_s=seconds(start_limit, option="--start-limit"),
        on_message=lambda text: print_stderr(f"engine: {text}"),
    )
    for launch in steps.launches:
        print_stderr(
            f"engine: {steps.engine} {steps.release}, tensor parallel {launch.tensor_parallel}:"
            f" {len(launch.prompts)} prompts, {len(launch.decodes)} batches of running sequences"
        )


def _wanted_sizes(spec: Path) -> "WantedSizes":
    from tuner.cli.progress import planning_progress
    from tuner.goals.plan import wanted_sizes

    with planning_progress("sizes", text="that planning looks up"):
        return wanted_sizes(spec)


@app.command("show")
def show(
    profile: Annotated[Path, typer.Argument(help="Folder of a stored profile or recording.")],
    links: Annotated[
        bool,
        typer.Option("--links", help="Latency and bandwidth of every pair."),
    ] = False,
    lagging: Annotated[
        bool, typer.Option("--stragglers", help="Ranks, links and nodes slower than their peers.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="With --stragglers: exit 1 if there is one, 2 if nothing can be compared.",
        ),
    ] = False,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", help="Also write every case, its rank and median to this file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a stored profile or routing recording."""
    from profilers.routing.store import holds_recording
    from profilers.store import read_profile
    from tuner.cli.profile_text import profile_text
    from tuner.tables import typed_table

    if strict and not lagging:
        raise TunerError("--strict goes with --stragglers: moetune profile show P --stragglers")
    if csv is not None and (links or lagging or holds_recording(profile)):
        raise TunerError("--csv is for the cases of a profile: moetune profile show P --csv FILE")
    if holds_recording(profile):
        profile_import.print_recording(profile, as_json=as_json)
        return
    if links or lagging:
        _show_links(profile, links=links, lagging=lagging, strict=strict, as_json=as_json)
        return
    stored = read_profile(profile)
    if csv is not None:
        write_csv(csv, typed_table(_cases(stored), CASE_TYPES))
    print_result(stored, profile_text, as_json=as_json)


def _show_links(profile: Path, *, links: bool, lagging: bool, strict: bool, as_json: bool) -> None:
    from profilers.store import read_profile
    from profilers.stragglers import has_peers, stragglers
    from tuner.cli import profile_text

    stored = read_profile(profile, operations=("link", "every_rank", "collective"))
    slow = stragglers(stored) if lagging else ()
    if strict and not has_peers(stored):
        raise TunerError(f"{profile}: {profile_text.NOTHING_COMPARED}")
    if as_json:
        shown: dict[str, object] = {}
        if links:
            shown["links"] = profile_text.links_json(stored)
        if lagging:
            shown["stragglers"] = [straggler.model_dump(mode="json") for straggler in slow]
        print_exact(json.dumps(shown, indent=2))
    else:
        parts = [profile_text.links_text(stored)] if links else []
        if lagging:
            shares_cores = stored.header.machine.oversubscribed
            parts.append(
                profile_text.stragglers_text(slow, shares_cores=shares_cores)
                if has_peers(stored)
                else profile_text.NOTHING_COMPARED
            )
        print_text("\n\n".join(parts))
    if strict and slow:
        raise typer.Exit(1)


@app.command("diff")
def diff(
    first: Annotated[Path, typer.Argument(help="The profile to compare with.")],
    second: Annotated[Path, typer.Argument(help="The newer profile.")],
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway", help="Compare different machines too; the differences are printed first."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two profiles of one machine; exit 1 when the second is significantly slower."""
    from profilers.compare import CaseVerdict, compare, incomparable
    from profilers.store import read_profile
    from tuner.cli.printed import ProfileDiff
    from tuner.cli.profile_text import diff_text

    before, after = read_profile(first), read_profile(second)
    differences = compare(before, after, anyway=anyway)
    differing = incomparable(before.header.machine, after.header.machine)
    counts = {
        verdict.value: sum(difference.verdict is verdict for difference in differences)
        for verdict in CaseVerdict
    }
    result = ProfileDiff(counts=counts, differences=differences, differing=differing)
    print_result(result, diff_text, as_json=as_json)
    if counts[CaseVerdict.SLOWER]:
        raise typer.Exit(1)


def _cases(profile: "Profile") -> Iterator[dict[str, object]]:
    for row in profile.measurements:
        median_s = row.median_s if row.times_s else None
        shown = {"case": row.case.id, "median_s": median_s, "repeats": len(row.times_s)}
        yield shown | row.model_dump(include={"status", "error", "source", "rank"}, mode="json")

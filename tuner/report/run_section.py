"""The whole run of a training plan: its length, checkpoints and spare nodes."""

from collections.abc import Iterator

from tuner.faults.forecast import RunForecast
from tuner.report.checkpoint_levels import interval_doubt, levels_sentence
from tuner.report.content import Section, named
from tuner.report.fewer_nodes import without_spare_sentence
from tuner.report.spare_choice import spares_sentence
from tuner.units import format_counted, format_money, format_number, format_ratio, format_s


def run_section(run: RunForecast, *, currency: str | None) -> Section:
    """Say how long the run takes with failures, and what was decided about them."""
    return Section(
        name="run",
        heading="The whole run",
        blocks=(
            named(
                ("run", ", ".join(_cost(run, currency))),
                ("checkpoints", "; ".join(_checkpoints(run)) or levels_sentence(run)),
                ("spares", spares_sentence(run)),
                ("without spare", without_spare_sentence(run)),
            ),
        ),
    )


def _cost(run: RunForecast, currency: str | None) -> Iterator[str]:
    if not run.finishes:
        yield f"never finishes: {run.reason}"
        return
    if run.device_hours is not None:
        yield f"{format_number(run.device_hours)} device hours"
    if run.cost is not None:
        yield f"cost {format_money(run.cost, currency)}"
    if run.expected_failures:
        yield format_counted(round(run.expected_failures), "failure")
    yield f"{format_ratio(run.effective_time_ratio)} of the time trains"


def _checkpoints(run: RunForecast) -> Iterator[str]:
    """Yield how often there is one, unless they are on several levels, and what speaks against."""
    if run.checkpoint_levels is not None and run.checkpoint_levels.host_interval_steps is not None:
        return
    if run.checkpoint_interval_s is not None and run.checkpoint_write_s is not None:
        yield (
            f"every {format_s(run.checkpoint_interval_s)} ({format_s(run.checkpoint_write_s)} to"
            " write)"
        )
    if doubt := interval_doubt(run):
        yield doubt

"""Plans and trials as text: sections of the report, as deep as a command shows."""

from dataclasses import replace
from pathlib import Path
from typing import Final

from tuner.cli.text import quote_path, screen, whole_text
from tuner.goals.registry import read_any_plan, read_verified
from tuner.plans.folder import TRIALS_NAME
from tuner.plans.train import Plan
from tuner.plans.what_if import Why
from tuner.report.content import NO_EVIDENCE, Depth, Evidence, Paragraph, named
from tuner.report.read import StoredPlan, report_on
from tuner.report.terminal import report_text
from tuner.report.train_page import decision_facts
from tuner.report.trials import AnyVerified, trials_section
from tuner.report.what_if import why_sections
from tuner.verify.kept_logs import kept_logs_line
from tuner.verify.placement_records import PlaceVerified
from tuner.verify.records import Verified

NO_WHY: Final = Why(rivals=())


def plan_text(plan: StoredPlan, *, folder: Path, verbose: bool = False) -> str:
    """Say what was planned and what to do next; `verbose` prints every note."""
    text = report_text(report_on(plan), screen(verbose=verbose))
    is_measured = isinstance(plan, Plan) and plan.decision and plan.provenance.device_kind
    step = f"moetune {'verify' if is_measured else 'explain'} {quote_path(folder)}"
    has_files = any(name.startswith("launch/") for name in plan.files)
    launch = f", launch files to {folder / 'launch'}" * has_files
    return f"{text}\n\nwritten to {folder}{launch}; next: {step}"


def explanation(
    plan: StoredPlan, *, why: Why = NO_WHY, folder: Path | None = None, verbose: bool = False
) -> str:
    """Explain why a plan was chosen, and what would change it."""
    evidence = NO_EVIDENCE if folder is None else Evidence(verified=read_verified(folder))
    report = report_on(plan, evidence)
    if isinstance(plan, Plan):
        # The breakdown of a step has the seconds in which runners-up differ.
        why = why.model_copy(update={"rivals": ()})
    whole = replace(report, sections=(*report.sections, *why_sections(why)))
    return report_text(whole, screen(Depth.MORE, verbose=verbose))


def verified_text(verified: AnyVerified, *, folder: Path) -> str:
    """Say which trial won, how accurate the model was, and where the launch files are."""
    lines = list(kept_logs_line(folder / TRIALS_NAME))
    if verified.winner is not None and not isinstance(verified, PlaceVerified):
        lines = [f"launch files: {folder / 'launch'}", *lines]
    won = verified.winner if isinstance(verified, Verified) else None
    return whole_text(
        trials_section(verified, read_any_plan(folder)),
        named(*decision_facts(won)) if won else None,
        *(Paragraph(text=line) for line in lines),
    )

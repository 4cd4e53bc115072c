"""Plans and trials as text: sections of the report, as deep as a command shows."""

from dataclasses import replace
from pathlib import Path
from typing import Final

from tuner.cli.text import quote_path, screen
from tuner.goals.registry import read_verified
from tuner.goals.train_folder import read_plan
from tuner.plans.folder import TRIALS_NAME
from tuner.plans.train import Plan
from tuner.plans.what_if import Why
from tuner.report.content import NO_EVIDENCE, Block, Depth, Evidence, Paragraph, named
from tuner.report.read import StoredPlan, report_on
from tuner.report.terminal import blocks_text, report_text
from tuner.report.train_page import decision_facts
from tuner.report.trials import trials_section
from tuner.report.what_if import why_sections
from tuner.verify.kept_logs import kept_logs_line
from tuner.verify.records import Verified

NO_WHY: Final = Why(rivals=())


def plan_text(plan: StoredPlan, *, folder: Path, verbose: bool = False) -> str:
    """Say what was planned and what to do next; `verbose` prints every note."""
    text = report_text(report_on(plan), screen(verbose=verbose))
    step = f"moetune explain {quote_path(folder)}"
    if isinstance(plan, Plan) and plan.decision is None:
        return text
    if isinstance(plan, Plan) and plan.provenance.device_kind:
        step = f"moetune verify {quote_path(folder)}"
    elif isinstance(plan, Plan):
        step += f"; launch files are in {folder / 'launch'}"
    return f"{text}\n\nwritten to {folder}; next: {step}"


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


def verified_text(verified: Verified, *, folder: Path) -> str:
    """Say which trial won, how accurate the model was, and where the launch files are."""
    predicted = read_plan(folder).predicted
    assert predicted is not None
    blocks: tuple[Block, ...] = trials_section(verified, predicted).blocks
    if verified.winner is not None:
        blocks += (
            named(*decision_facts(verified.winner)),
            Paragraph(text=f"launch files: {folder / 'launch'}"),
        )
    blocks += tuple(Paragraph(text=line) for line in kept_logs_line(folder / TRIALS_NAME))
    return blocks_text(blocks, screen(Depth.MORE, verbose=True))

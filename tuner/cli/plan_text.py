"""A training plan and its trials as text: sections of the report, as deep as a command shows."""

from pathlib import Path
from typing import Final

from tuner.cli.text import explained_text, quote_path, screen
from tuner.goals.train_folder import read_plan
from tuner.plans.folder import TRIALS_NAME, read_verified_as
from tuner.plans.train import Plan
from tuner.plans.what_if import Why
from tuner.report.content import Block, Depth, Paragraph, named
from tuner.report.terminal import blocks_text, report_text
from tuner.report.train_page import TrainEvidence, decision_facts, train_report
from tuner.report.trials import trials_section
from tuner.verify.kept_logs import kept_logs_line
from tuner.verify.records import Verified

NO_WHY: Final = Why(rivals=())


def plan_text(plan: Plan, *, folder: Path, verbose: bool = False) -> str:
    """Say what was planned and what to do next; `verbose` prints every note."""
    text = report_text(train_report(plan, TrainEvidence()), screen(verbose=verbose))
    if plan.decision is None:
        return text
    step = f"moetune explain {quote_path(folder)}; launch files are in {folder / 'launch'}"
    if plan.provenance.device_kind:
        step = f"moetune verify {quote_path(folder)}"
    return f"{text}\n\nwritten to {folder}; next: {step}"


def explanation(
    plan: Plan, *, why: Why = NO_WHY, folder: Path | None = None, verbose: bool = False
) -> str:
    """Explain why this plan was chosen, with its trials if the folder holds any."""
    verified = None if folder is None else read_verified_as(Verified, folder)
    # The breakdown of a step has the seconds in which runners-up differ.
    report = train_report(plan, TrainEvidence(verified=verified))
    return explained_text(report, why.model_copy(update={"rivals": ()}), verbose=verbose)


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

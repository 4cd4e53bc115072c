"""Every mode that was asked for, answered beside the others: one table, one reason a line.

Answers that keep the targets and can be launched are ranked; those that would serve and no release
launches are named with what they would save; the rest say what stands in the way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, get_args

from tuner.planner.serve.afd_unlaunched import Apart, apart_of, told_apart
from tuner.planner.serve.most_rate import answer_goal
from tuner.planner.serve.preference import (
    counted,
    gain_ratio,
    held_back_by,
    lost_by,
    ranked,
    worth_of,
)
from tuner.planner.serve.remote_prefill import cuts_of
from tuner.planner.serve.solve_mode import Found, Question, least_spare
from tuner.planner.serve.to_plan import missed_with, refusals_of, told_of
from tuner.serve_plan import PUBLISHED_MODES, ServeModeAnswer, ServeUnlaunchable
from tuner.spec.serving.goal import Mode
from tuner.spec.serving.manifests.registry import modes_on

NO_PROGRAM: Final = "no program says the most requests of attention and experts apart"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answers:
    """What all modes come to."""

    found: tuple[Found, ...]
    """Those that serve the traffic, whether they keep the targets or not."""
    refused: Mapping[Mode, tuple[str, ...]]
    """Of them, what the release refuses."""
    fitting: tuple[Found, ...]
    """Those that keep the targets and can be launched, best first."""
    apart: Apart | str | None
    """Attention and experts apart, or why not; None: not asked for, or answered like the others."""

    @property
    def launched(self) -> tuple[Found, ...]:
        """Those that can be launched, whether they keep the targets or not."""
        return tuple(one for one in self.found if not self.refused[one.mode])

    def of(self, mode: Mode) -> Found | None:
        """Return a mode's answer."""
        return next((one for one in self.found if one.mode == mode), None)


def modes_of(question: Question) -> tuple[Mode, ...]:
    """Return the modes that are asked for, in the order of their list."""
    return tuple(mode for mode in get_args(Mode) if mode in question.spec.goal.modes)


def answers_of(question: Question) -> Answers:
    """Answer every mode."""
    found = tuple(one for mode in modes_of(question) if (one := answer_goal(question, mode)))
    refused = {one.mode: refusals_of(one, question) for one in found}
    fitting = ranked([one for one in found if not one.missed and not refused[one.mode]], question)
    apart: Apart | str | None = None
    if _is_sized_alone(question) and question.spec.goal.objective == "rate":
        apart = NO_PROGRAM
    elif _is_sized_alone(question):
        spare = fitting[0].spare if fitting else least_spare(question)
        apart = apart_of(question, spare_ratio=spare.most_ratio)
    return Answers(found=found, refused=refused, fitting=fitting, apart=apart)


def _is_sized_alone(question: Question) -> bool:
    """Whether attention and experts apart are asked for, and no release launches them."""
    mode = "attention_expert"
    is_asked = mode in question.spec.goal.modes
    return is_asked and mode not in modes_on(question.spec.goal, question.spec.cluster)


def table_of(answers: Answers, question: Question) -> tuple[ServeModeAnswer, ...]:
    """Return a line for every mode."""
    return tuple(
        _apart_line(answers, question)
        if mode == "attention_expert" and _is_sized_alone(question)
        else _line(mode, answers, question)
        for mode in modes_of(question)
    )


def _line(mode: Mode, answers: Answers, question: Question) -> ServeModeAnswer:
    found, best = answers.of(mode), _best(answers)
    if found is None:
        return ServeModeAnswer(mode=mode, status="none", told=why_none(mode, question))
    broken = answers.refused[mode]
    status, told = "alternative", "" if best is None else lost_by(found, best, question.spec.goal)
    if found.missed:
        status, told = "missed", missed_with(found)
    elif broken:
        status, told = "unlaunchable", f"{told_of(found)}; {broken[0]}"
    elif found is best:
        status, told = "chosen", ""
    elif best is not None:
        told += held_back_by(found, best, question.spec.goal)
    gained = None if best is None else gain_ratio(_worth(found, question), best, question.spec.goal)
    return ServeModeAnswer.model_validate(
        {
            "mode": mode,
            "status": status,
            "devices": found.devices,
            "requests_per_s": found.rate_per_s,
            "cost_per_hour": found.price_per_hour,
            "ttft_s": float(found.played.ttft_s_R.mean()),
            "tpot_s": float(found.played.tpot_s_R.mean()) if len(found.played.tpot_s_R) else None,
            "gain_ratio": gained,
            "told": told,
        }
    )


def _apart_line(answers: Answers, question: Question) -> ServeModeAnswer:
    apart = answers.apart
    if not isinstance(apart, Apart):
        return ServeModeAnswer(mode="attention_expert", status="none", told=apart or "")
    return ServeModeAnswer(
        mode="attention_expert",
        status="unlaunchable",
        devices=apart.devices,
        cost_per_hour=apart.price_per_hour or None,
        ttft_s=apart.ttft_s,
        tpot_s=apart.tpot_s,
        gain_ratio=_apart_gain(apart, answers, question),
        told=told_apart(apart, question, against=""),
    )


def _apart_gain(apart: Apart, answers: Answers, question: Question) -> float | None:
    best, goal = _best(answers), question.spec.goal
    if best is None:
        return None
    worth = apart.price_per_hour if goal.objective == "cost" else float(apart.devices)
    return gain_ratio(worth, best, goal)


def unlaunchable_of(answers: Answers, question: Question) -> tuple[ServeUnlaunchable, ...]:
    """Name modes that no release launches, with what they would save."""
    best, goal = _best(answers), question.spec.goal
    lines = []
    if isinstance(answers.apart, Apart):
        against = "" if best is None else f", the chosen plan takes {best.devices}"
        if best is not None and goal.objective == "cost":
            price = answers.apart.price_per_hour
            against += f"; {price:.4g} an hour, the chosen plan {_worth(best, question):.4g}"
        lines.append(
            ServeUnlaunchable(
                feature=told_apart(answers.apart, question, against=against),
                gain_ratio=max(_apart_gain(answers.apart, answers, question) or 0.0, 0.0),
            )
        )
    for one in answers.found:
        broken = answers.refused[one.mode]
        if not broken or one.missed:
            continue
        beside = counted(one.devices) if best is None else lost_by(one, best, goal)
        gained = 0.0 if best is None else gain_ratio(_worth(one, question), best, goal)
        guess = "" if one.mode in PUBLISHED_MODES else "; no published run stands behind this mode"
        lines.append(
            ServeUnlaunchable(
                feature=f"{told_of(one)}: {beside}; {broken[0]}{guess}", gain_ratio=max(gained, 0.0)
            )
        )
    return tuple(lines)


def why_none(mode: Mode, question: Question) -> str:
    """Say why a mode serves nothing."""
    sites, links = question.sites, question.spec.cluster.links
    if mode == "prefill_offload":
        if len(sites) < 2:
            return "there is no second pool to read long prompts"
        if not links:
            return "no link joins the pools, so that no cache gets from one to another"
        if not cuts_of(question.spec.goal, question.demand):
            return "all prompts are equally long, so that no length parts them"
    if mode == "attention_expert" and question.cells.illegal_by:
        return next(iter(question.cells.illegal_by))
    if question.options.slowest_tpot_s == float("inf"):
        return "memory: no way to split the model leaves room for one request"
    return "the pools lack the devices or links for it at this traffic within the targets"


def _best(answers: Answers) -> Found | None:
    return answers.fitting[0] if answers.fitting else None


def _worth(found: Found, question: Question) -> float:
    return worth_of(found, question.spec.goal)

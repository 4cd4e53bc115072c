"""From answers to a spec that `moetune plan` accepts."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from profilers.errors import ProfilerError
from tuner.draft.questions import Answers, Goal, Question, questions_of
from tuner.draft.text import spec_text
from tuner.errors import SpecError, TunerError
from tuner.spec.files import shown_path
from tuner.spec.place_read import read_place_spec
from tuner.spec.read import read_spec
from tuner.spec.serving.read import read_serve_spec
from tuner.train_api import refuse_unlaunchable


def answered(goal: Goal, given: Mapping[str, str]) -> dict[str, str]:
    """Return the answers to every question of a goal, the defaults filled in, all checked.

    Args:
        goal: what the spec is for.
        given: answers by key.

    Raises:
        SpecError: one is unacceptable, one without default is missing, or one is not asked.
    """
    questions = questions_of(goal)
    known = {question.key for question in questions}
    strange = [key for key in given if key not in known]
    if strange:
        raise SpecError(
            f"--{strange[0]} says nothing about a {goal!r} goal; its flags: "
            + ", ".join(f"--{key}" for key in sorted(known))
        )
    missing = [
        question.key
        for question in questions
        if question.default is None and not given.get(question.key)
    ]
    if missing:
        raise SpecError(
            f"{', '.join(f'--{key}' for key in missing)} missing; a {goal!r} spec needs "
            + ", ".join(f"--{one.key}" for one in questions if one.default is None)
        )
    answers: dict[str, str] = {}
    for question in questions:
        text = given.get(question.key) or default_of(question, {**given, **answers}) or ""
        answers[question.key] = checked(question, text, answers)
    return answers


def default_of(question: Question, known: Answers) -> str | None:
    """Return the default of a question, given the answers and flags that are known.

    Raises:
        SpecError: none can be derived; the message names the flag.
    """
    try:
        return question.default_of(known)
    except TunerError as error:
        raise SpecError(f"--{question.key}: {error}") from error


def checked(question: Question, text: str, answers: Answers) -> str:
    """Return an answer, stripped; an empty one where it may be left out.

    Raises:
        SpecError: it is unacceptable; the message names the flag.
    """
    found = text.strip()
    if not found and question.unless and not answers.get(question.unless):
        raise SpecError(f"--{question.unless} or --{question.key} is missing; state one of them")
    if not found and question.default == "":
        return ""
    if not found:
        raise SpecError(f"--{question.key}: missing")
    try:
        question.check(found, answers)
    except (TunerError, ProfilerError) as error:
        said = str(error)
        known = said.startswith("--")
        raise SpecError(said if known else f"--{question.key}: {said}") from error
    return found


def draft(goal: Goal, answers: Answers, *, folder: Path | None) -> str:
    """Return the text of a spec that `moetune plan` accepts.

    Args:
        goal: what it is for.
        answers: as `answered` returns them.
        folder: that the file will lie in, which its paths are relative to; None: absolute paths.

    Raises:
        SpecError: the answers do not go together.
    """
    with drafted(goal, answers):
        return spec_text(goal, answers, folder=folder)


@contextmanager
def drafted(goal: Goal, answers: Answers) -> Iterator[Path]:
    """Give a file with the spec, paths absolute, for as long as it is needed.

    Raises:
        SpecError: the answers do not go together; the message does not name the file.
    """
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        path = Path(scratch) / "spec.yaml"
        path.write_text(spec_text(goal, answers, folder=None), encoding="utf-8")
        try:
            _check(goal, path)
            yield path
        except TunerError as error:
            shown = str(error).replace(f"{shown_path(path)}: ", "").replace(f"{path}: ", "")
            raise type(error)(shown) from error


def _check(goal: Goal, path: Path) -> None:
    if goal == "serve":
        read_serve_spec(path)
    elif goal == "place":
        read_place_spec(path)
    else:
        refuse_unlaunchable(read_spec(path))

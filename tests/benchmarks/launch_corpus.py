"""Public launches of a folder: how many are read without a lost flag.

    python tests/benchmarks/launch_corpus.py FOLDER... [--set NAME=VALUE]... [--show]

FOLDERs hold checkouts of repositories with recipes. Launches are shell scripts, fenced blocks of
Markdown (also inside YAML), Kubernetes objects, Compose files and recipes of srt-slurm that start a
server of vLLM, SGLang or TensorRT-LLM. Each is read against one large model on one large pool, so
that only the reading is judged. A script whose variables its harness sets gets them from --set.

A launch is *read* if every flag of its server's command ends among the flags that the estimate
lists, with its value; *refused* if one line says why; else *lost*. The flags are those that a few
regular expressions find in the command, independent of the reader. Equal commands count once. Exit
code 1: a launch is lost.
"""

import re
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.benchmarks.bars import parse
from tests.expect import present
from tuner.engines.reading.serve_launch import ServingLaunch, Surroundings
from tuner.errors import TunerError
from tuner.estimate.serving.estimate import pool_named, surroundings
from tuner.estimate.serving.registry import READERS, read_serving_text
from tuner.goals.serve_spec import read_serve_spec

MODELS = Path(__file__).parents[2] / "examples/models"
_SPEC: Final = f"""schema_version: 1
model: {MODELS}/deepseek-v3
cluster: {{pools: [{{name: pool, device: h200, nodes: 64, devices_per_node: 8}}]}}
goal:
  kind: serve
  engine: {{name: ENGINE}}
  traffic: {{concurrency: 8, input_tokens: 1000, output_tokens: 100}}
"""
LONGEST_POSITION: Final = 2**24
MANY_EXPERTS: Final = 23_040
"""Divides over the ranks of any recipe."""
_START: Final = re.compile(
    r"vllm serve\b|sglang serve\b|(?:sglang\.|/)launch_server\b|trtllm-serve\b(?! *disagg)"
    r"|dynamo\.(?:vllm|sglang|trtllm)\b"
    r"|vllm\.entrypoints\.openai\.api_server|vllm/vllm-openai\S*(?= +\S)"
    r"|\bvllm-openai\S* *\\$"
)
_NO_SERVER: Final = re.compile(
    r"^\s*(?:#|echo|printf|pkill|pgrep|pip|uv pip|docker (?:pull|build|tag)|from |import |- image:)"
    r"|--help|which |`vllm serve`"
)
_FENCE: Final = re.compile(
    r"^([ \t]*)```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE
)
_SHELLS: Final = frozenset({"", "bash", "sh", "shell", "console", "yaml", "yml", "text", "zsh"})
_FLAG: Final = re.compile(
    r"(?:^|(?<=[\s\"'(=]))(--[A-Za-z][\w.+-]*|-(?:[tdpe]p|dpl|dcp|sc|cc|q)\b)(?=[\s=\"']|$)"
)
_OBJECTS: Final = re.compile(r"^(?:kind:|services:|backend:)", re.MULTILINE)
_ROLE_OPTIONS: Final = ("vllm_config", "sglang_config", "trtllm_config")
_VARIABLE: Final = re.compile(r"\$\{?([A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusLaunch:
    """One launch of a corpus."""

    place: str
    text: str
    command: str
    """Of its server, as far as regular expressions find it; empty: a file of objects."""
    role: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a launch."""

    kind: str
    """`read`, `refused`, or `lost`."""
    reason: str = ""


def find_launches(folder: Path) -> Iterator[CorpusLaunch]:
    """Yield the launches of a folder's files, equal commands once."""
    seen: set[str] = set()
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (".md", ".mdx", ".yaml", ".yml", ".sh", ".slurm", ".sbatch"):
            continue
        if not path.is_file() or path.stat().st_size > 200_000:
            continue
        text = path.read_text(errors="replace")
        for launch in _file_launches(path.relative_to(folder.parent).as_posix(), text):
            key = " ".join((launch.command or launch.text).replace("\\\n", " ").split())
            if key not in seen:
                seen.add(key)
                yield launch


def _file_launches(place: str, text: str) -> Iterator[CorpusLaunch]:
    if place.endswith((".md", ".mdx")) or "```" in text:
        for match in _FENCE.finditer(text):
            indent, language, block = match.groups()
            line = text.count("\n", 0, match.start()) + 1
            if language in _SHELLS:
                block = textwrap.dedent(re.sub(rf"^{indent}", "", block, flags=re.MULTILINE))
                yield from _block_launches(f"{place}:{line}", block)
    elif place.endswith((".yaml", ".yml")):
        if _OBJECTS.search(text) and _starts_server(text):
            yield CorpusLaunch(place=place, text=text, command="")
    elif _commands(text):
        yield CorpusLaunch(place=place, text=text, command=_commands(text)[0])


def _starts_server(text: str) -> bool:
    try:
        return any(True for _ in _typed_in_objects(text))
    except yaml.YAMLError:
        return _START.search(text) is not None


def _block_launches(place: str, block: str) -> Iterator[CorpusLaunch]:
    """Yield the launch of a block, or each of several with the assignments of the block."""
    if _OBJECTS.search(block):
        if _starts_server(block):
            yield CorpusLaunch(place=place, text=block, command="")
        return
    block = re.sub(r"^\$ ", "", block, flags=re.MULTILINE)
    commands = _commands(block)
    if len(commands) == 1:
        yield CorpusLaunch(place=place, text=block, command=commands[0])
        return
    set_before = re.findall(r"^(?:export )?[A-Za-z_]\w*=(?![^\n]*\\\n)[^\n]*$", block, re.MULTILINE)
    for command in commands:
        yield CorpusLaunch(place=place, text="\n".join((*set_before, command)), command=command)


def _commands(text: str) -> list[str]:
    """Return the logical lines that start a server, JSON over several lines included."""
    lines: list[str] = []
    for line in text.split("\n"):
        goes_on = lines and (
            re.search(r"\\\s*$", lines[-1]) or lines[-1].count("'") % 2 or _open_quote(lines[-1])
        )
        if goes_on and not (line.lstrip().startswith("#")):
            lines[-1] += "\n" + line
        else:
            lines.append(line)
    return [line for line in lines if _START.search(line) and not _NO_SERVER.search(line)]


def _open_quote(line: str) -> bool:
    return re.search(r"-l?c \"", line) is not None and line.replace('\\"', "").count('"') % 2 == 1


def evaluate_launch(
    launch: CorpusLaunch, around: Surroundings, *, given: Mapping[str, str]
) -> Verdict:
    """Read a launch, and look for its flags among those that were read."""
    preamble = "".join(
        f"export {name}={value}\n" for name, value in given.items() if launch.command
    )
    try:
        sourced = [*re.finditer(r"^\s*(?:source|\.) [^\n]*\n", launch.text, re.MULTILINE)]
        at = sourced[-1].end() if sourced else 0
        read = _read(launch.text[:at] + preamble + launch.text[at:], around)
        typed = [*_typed_flags(launch)] if launch.command else [*_typed_in_objects(launch.text)]
    except TunerError as error:
        reason = str(error).partition(": ")[2]
        is_lost = reason.startswith("starts no server of")
        return Verdict(kind="lost" if is_lost else "refused", reason=reason)
    except Exception as error:
        return Verdict(kind="lost", reason=f"crashed: {type(error).__name__}: {error}")
    lost = sorted(set(_lost_flags(typed, read)))
    return Verdict(kind="lost", reason=" ".join(lost)) if lost else Verdict(kind="read")


def _read(text: str, around: Surroundings) -> list[ServingLaunch]:
    """Read the launch of a text, or those of all its groups."""
    try:
        first = read_serving_text(text, around, engine="vllm", source="launch")
    except TunerError as error:
        several = re.search(r"name one of them with --role: (.*)", str(error))
        if several is None:
            raise
    else:
        return [first] if first.counterpart is None else [first, first.counterpart]
    names = several[1].split(", ")
    return [
        read_serving_text(text, around, engine="vllm", source="launch", role=name)
        for name in dict.fromkeys(names)
    ]


def _lost_flags(
    typed_flags: Sequence[tuple[str, str]], launches: Sequence[ServingLaunch]
) -> Iterator[str]:
    values: dict[str, str] = {}
    for read in launches:
        flags = read.flags
        for said in (*flags.understood, *flags.ignored, *flags.unpriced, *flags.timeless):
            name = said.split()[0].lstrip("-")
            values[name] = f"{values.get(name, '')} {said}"
    accounts = ("not read", "is overridden by")
    notes = " ".join(
        note.replace("_", "-")
        for read in launches
        for note in read.notes
        if any(one in note for one in accounts)
    )
    spellings = READERS[launches[0].engine].server.spellings
    for typed, value in typed_flags:
        name = typed.lstrip("-").replace("_", "-").rstrip("+")
        names = [one for one in values if one in (name, spellings.get(name)) or _is_part(one, name)]
        names = names or [one for one in values if one.startswith(name)]
        names.sort(key=lambda one: one not in (name, spellings.get(name)))
        if not names and f"-{name}" not in notes:
            yield typed
        elif names and value and value[:20] not in values[names[0]] and f"-{names[0]}" not in notes:
            yield f"{typed} {value} ({values[names[0]]})"


def _is_part(listed: str, typed: str) -> bool:
    return listed.startswith(f"{typed}.") or typed.startswith(f"{listed}.")


def _typed_flags(launch: CorpusLaunch) -> Iterator[tuple[str, str]]:
    """Yield the flags of a command, also those of arrays that it names, with a plain value."""
    command = _START.split(launch.command, maxsplit=1)[-1]
    texts = [command]
    for name in _VARIABLE.findall(command):
        array = re.findall(rf"^{name}\+?=(\([^()]*\)|\"[^\"\n]*\")", launch.text, re.MULTILINE)
        texts += [one.strip('()"') for one in array]
    for text in texts:
        text = re.sub(r"(?:^|(?<=\s))#.*$", " ", text, flags=re.MULTILINE)
        text = re.split(r"\s(?:2?>|&>|\||&&|&)(?:\s|\S*$)", text)[0]
        text = re.sub(r"'[^']*'|\{[^\n]*\}", " ? ", text)
        for match in _FLAG.finditer(text):
            value = re.match(r"[ =]+\"?([\w./:@-]*\w)(?=[\s\"]|$)", text[match.end() :])
            is_value = value is not None and not value[1].startswith("-")
            yield match[1], value[1] if value is not None and is_value else ""


def _typed_in_objects(text: str) -> Iterator[tuple[str, str]]:
    """Yield the flags of every container, service or role of a YAML text that starts a server."""
    for document in yaml.safe_load_all(text):
        for words in _word_lists(document):
            command = " ".join(words)
            if _START.search(command + " "):
                yield from _typed_flags(CorpusLaunch(place="", text=command, command=command))


def _word_lists(node: Any) -> Iterator[list[str]]:
    if isinstance(node, list):
        for inner in node:
            yield from _word_lists(inner)
    if not isinstance(node, dict):
        return
    parts = [node.get(name) for name in ("image", "entrypoint", "command", "args")]
    if any(parts[1:]):
        yield [str(word) for part in parts for word in (part if isinstance(part, list) else [part])]
    for name, inner in node.items():
        if str(name) in _ROLE_OPTIONS and isinstance(inner, dict):
            for flags in inner.values():
                pairs = flags.items() if isinstance(flags, dict) else ()
                on = [f"--{key} ?" for key, value in pairs if value not in (None, False)]
                yield ["vllm serve", *on]
        if name != "initContainers":
            yield from _word_lists(inner)


def _around() -> Surroundings:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.yaml"
        path.write_text(_SPEC.replace("ENGINE", "vllm"))
        spec = read_serve_spec(path)
    around = surroundings(spec, pool_named(spec, None))
    moe = present(around.model.moe).model_copy(update={"num_experts": MANY_EXPERTS})
    model = around.model.model_copy(update={"max_position": LONGEST_POSITION, "moe": moe})
    return Surroundings(model=model, pool=around.pool, memory_bytes=around.memory_bytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each folder, and what was not read; exit code 1: a launch is lost."""
    options = {
        "folders": {"nargs": "+", "type": Path},
        "--set": {"action": "append", "default": [], "metavar": "NAME=VALUE"},
        "--show": False,
    }
    given = parse(__doc__, options, arguments)
    variables = dict(one.partition("=")[::2] for one in given.set)
    around, total = _around(), Counter[str]()
    missed: list[str] = []
    sys.stdout.write(f"{'corpus':14} launches   read refused   lost\n")
    for folder in given.folders:
        counts = Counter[str]()
        for launch in find_launches(folder):
            verdict = evaluate_launch(launch, around, given=variables)
            counts[verdict.kind] += 1
            if verdict.kind == "lost" or (given.show and verdict.kind == "refused"):
                missed.append(f"{verdict.kind:8}{launch.place}: {verdict.reason[:220]}")
        sys.stdout.write(_row(folder.name, counts))
        total += counts
    sys.stdout.write(_row("all", total) + "".join(f"{one}\n" for one in missed))
    return int(total["lost"] > 0)


def _row(name: str, counts: Counter[str]) -> str:
    shares = "".join(f"{counts[kind]:8}" for kind in ("read", "refused", "lost"))
    share = counts["read"] / max(counts.total(), 1)
    return f"{name:14}{counts.total():9}{shares}   {share:.1%} read\n"


if __name__ == "__main__":
    sys.exit(main())

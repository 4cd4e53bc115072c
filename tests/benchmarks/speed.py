"""Seconds of the processor, memory and bounds of whole commands, in one tree or paired in several.

    python tests/benchmarks/speed.py [NAME ...] [--tree CHECKOUT ...] [--repeats 3]
        [--tables FOLDER ...]

Each command is its own process, as a user starts it. With `--tree`, once for each checkout to
compare, a round runs a command in every tree before any again, so that load on the machine meets
all alike; printed are medians: wall and processor seconds, child processes included, peak memory,
and of plans the certificate. Serving plans are made from datasheets, or from the kernels of
`--tables` (stored profiles or tables of aiconfigurator).

NAME is a part of a command's name; without one all run. `check` checks 100 scenarios of a team, a
second of planning each, which are accepted first. Exit code 1: a bound of `COMMANDS` is missed.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.benchmarks.bars import parse, say

CHECKOUT: Final = Path(__file__).parents[2]
EXAMPLES: Final = CHECKOUT / "examples"
NO_TABLES: Final = "sys.modules['aiconfigurator_core'] = None"
"""Hides the package, so that datasheets are used."""
RUN: Final = f"import sys; {NO_TABLES}; from tuner.__main__ import main; sys.exit(main())"
SOLVED_RATIO: Final = 1e-6
"""Gap at which a program is solved."""

TRAIN: Final = """
schema_version: 1
model: {examples}/models/{model}
cluster:
  pools: [{pools}]
  links: [{links}]
goal: {{kind: train, sequence_length: 4096, global_batch_size: {batch}, precision: bf16}}
search: {{{search}}}
emit: [megatron-lm, slurm]
"""
SERVE: Final = """
schema_version: 1
model: {examples}/models/{model}
cluster: {{pools: [{{name: pool, device: h100-sxm, nodes: {nodes}, devices_per_node: 8}}]}}
goal:
  kind: serve
  engine: {{name: {engine}}}
  traffic: {{{load}, input_tokens: 4000, output_tokens: 1000}}
  slo: {{ttft: {{p90: 2s}}, tpot: {{p90: 50ms}}}}
  objective: goodput
emit: [{engine}]
"""
FEW: Final = (
    "tensor_model_parallel_size: [1, 2], pipeline_model_parallel_size: [2, 4],"
    " context_parallel_size: 1, micro_batch_size: 1, zero_stage: 1, dispatcher: alltoall,"
    " expert_tensor_parallel_size: 1"
)
NODES_OF_MODEL: Final[Mapping[str, int]] = {
    "mixtral-8x7b": 8,
    "qwen3-30b-a3b": 4,
    "gpt-oss-20b": 2,
    "llama-3.1-8b": 2,
    "deepseek-v2-lite": 2,
}
SCENARIOS: Final = 100


@dataclass(frozen=True, kw_only=True)
class Command:
    """What is timed, and at most how long; None: without a bound."""

    spec: str | Path = ""
    """A plan's; empty: the check."""
    wall_s: float | None = None
    cpu_s: float | None = None
    peak_bytes: float | None = None
    takes_tables: bool = False


def pool(name: str, device: str, nodes: int) -> str:
    """Return a pool of nodes of eight devices."""
    rate = "nic: 400Gbit/s"
    return f"{{name: {name}, device: {device}, nodes: {nodes}, devices_per_node: 8, {rate}}}"


def train(model: str, pools: str, *, batch: int, links: str = "", search: str = "") -> str:
    """Return a spec of training."""
    return TRAIN.format(
        examples=EXAMPLES, model=model, pools=pools, batch=batch, links=links, search=search
    )


def serve(model: str, engine: str, *, nodes: int, load: str) -> str:
    """Return a spec of serving."""
    return SERVE.format(examples=EXAMPLES, model=model, engine=engine, nodes=nodes, load=load)


SERVING: Final[Mapping[str, Any]] = {"cpu_s": 5.0, "peak_bytes": 400e6, "takes_tables": True}
COMMANDS: Final[Mapping[str, Command]] = {
    "train DeepSeek-V3 on 2,048 H800": Command(
        spec=EXAMPLES / "worked/deepseek-v3-2048-h800/spec.yaml", wall_s=7.0
    ),
    "train Qwen3-235B on 512 H100": Command(
        spec=train("qwen3-235b-a22b", pool("h100", "h100-sxm", 64), batch=2048), wall_s=7.0
    ),
    "train DeepSeek-V3 on 512 H100 + 512 A100": Command(
        spec=train(
            "deepseek-v3",
            f"{pool('h100', 'h100-sxm', 64)}, {pool('a100', 'a100-80gb-sxm', 64)}",
            links="{between: [h100, a100], bandwidth: 3200Gbit/s, latency: 20us}",
            batch=7680,
        )
    ),
    "serve DeepSeek-V3 on 32 H200": Command(
        spec=EXAMPLES / "serving/deepseek-v3-32-h200.yaml", **SERVING
    ),
    "serve Mixtral on 16 H100": Command(
        spec=serve("mixtral-8x7b", "vllm", nodes=2, load="rate: 10/s"), **SERVING
    ),
    "serve Qwen3-235B on 32 H100": Command(
        spec=serve("qwen3-235b-a22b", "sglang", nodes=4, load="rate: 5/s"), **SERVING
    ),
    "serve Mixtral on 16 H100 + 32 L40S + 8 H20": Command(
        spec=EXAMPLES / "serving/mixed-pool.yaml", cpu_s=10.0, takes_tables=True
    ),
    "check": Command(wall_s=60.0),
}


def write_scenarios(folder: Path) -> None:
    """Write the scenarios of a team with five models; every tenth is a deployment."""
    names = list(NODES_OF_MODEL)
    for number in range(SCENARIOS):
        model = names[number % len(names)]
        cluster = pool("h100", "h100-sxm", NODES_OF_MODEL[model])
        text = train(model, cluster, batch=128 * (1 + number // len(names)), search=FEW)
        if number % 10 == 9:
            load = f"concurrency: {16 * (1 + number // 10)}"
            text = serve("qwen3-30b-a3b", "vllm", nodes=1, load=load)
        (folder / f"{number:03d}").mkdir(parents=True)
        (folder / f"{number:03d}" / "spec.yaml").write_text(text, encoding="utf-8")


def run(words: Sequence[str | Path], *, tree: Path, folder: Path) -> dict[str, Any]:
    """Run moetune; return wall and processor seconds, peak memory, and a plan's certificate.

    Seconds and memory are the kernel's own account of the process and of those it waited for.

    Raises:
        RuntimeError: it ended with another code than 0, or than 1 where nothing fits.
    """
    command = [sys.executable, "-c", RUN, *map(str, words), "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        started_s = time.perf_counter()
        child = subprocess.Popen(command, cwd=tree, stdout=out, stderr=err, env=environment)
        _, status, used = os.wait4(child.pid, 0)
        wall_s = time.perf_counter() - started_s
    child.returncode = os.waitstatus_to_exitcode(status)
    printed = (folder / "stdout").read_bytes()
    if child.returncode not in (0, 1) or not printed:
        raise RuntimeError(f"{words}: {(folder / 'stderr').read_text(encoding='utf-8')[-2000:]}")
    return {
        "wall_s": wall_s,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_bytes": used.ru_maxrss * 1024,
        "certificate": json.loads(printed).get("certificate"),
    }


def timed(
    command: Command, trees: Sequence[Path], *, repeats: int, tables: Sequence[Path]
) -> Iterator[dict[str, Any]]:
    """Time one command in each tree, in turn."""
    with tempfile.TemporaryDirectory(prefix="moetune-speed-") as name:
        folder = Path(name)
        words: list[str | Path] = ["check", folder / "checks"]
        if not command.spec:
            write_scenarios(folder / "checks")
            run([*words, "--update"], tree=trees[0], folder=folder)
        else:
            spec = command.spec if isinstance(command.spec, Path) else folder / "spec.yaml"
            if isinstance(command.spec, str):
                spec.write_text(command.spec, encoding="utf-8")
            words = ["plan", spec, "-o", folder / "plan"]
            words += [word for one in tables for word in ("--profile", one.resolve())]
        rounds = [[run(words, tree=tree, folder=folder) for tree in trees] for _ in range(repeats)]
    for runs in zip(*rounds, strict=True):
        median = {
            key: statistics.median(one[key] for one in runs)
            for key in ("wall_s", "cpu_s", "peak_bytes")
        }
        yield {**median, "certificate": runs[0]["certificate"]}


def misses(command: Command, found: Mapping[str, Any]) -> list[str]:
    """Return the bounds that a command misses."""
    bounds = {name: getattr(command, name) for name in ("wall_s", "cpu_s", "peak_bytes")}
    missed = [name for name, most in bounds.items() if most is not None and found[name] > most]
    gap = (found["certificate"] or {}).get("program_gap_ratio") or 0.0
    return [*missed, *(["program_gap_ratio"] if gap > SOLVED_RATIO else [])]


def main() -> int:
    """Print the figures and return 1 if any misses its bound."""
    paths = {"type": Path, "action": "append", "default": []}
    given = parse(
        __doc__,
        {"names": {"nargs": "*"}, "--tree": paths, "--repeats": 3, "--tables": dict(paths)},
    )
    trees = [one.resolve() for one in given.tree] or [CHECKOUT]
    every_missed = []
    for name, command in COMMANDS.items():
        if given.names and not any(part in name for part in given.names):
            continue
        tables = given.tables if command.takes_tables else []
        results = timed(command, trees, repeats=given.repeats, tables=tables)
        for tree, found in zip(trees, results, strict=True):
            certificate = found["certificate"]
            missed = misses(command, found)
            every_missed += missed
            proof = "" if certificate is None else f", {certificate['status']}"
            if certificate is not None and certificate["gap_ratio"] is not None:
                proof += f", gap {certificate['gap_ratio']:.2%}"
            say(
                f"{name}, {tree.name}: {found['wall_s']:.1f} s, {found['cpu_s']:.1f} CPU-s,"
                f" {found['peak_bytes'] / 1e6:.0f} MB{proof}"
                f"{', MISSED ' + ', '.join(missed) if missed else ''}"
            )
    return int(bool(every_missed))


if __name__ == "__main__":
    sys.exit(main())

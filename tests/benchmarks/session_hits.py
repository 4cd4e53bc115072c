"""Prefix cache hits that vLLM counts on a processor against those that are planned; run as

    python tests/benchmarks/session_hits.py --vllm BIN --model DIR [--requests 64] [--hit 0.5]

Two instances, which is what two attention-DP ranks are to a prefix cache, behind the emitted
router: in turn, and following prefixes. The emitted benchmarks send sessions (one prefix each) and
one common prefix. BIN is the folder of `vllm`, `vllm-router` and `aiperf`, or several such folders
separated by colons; DIR is what examples/serving/cpu/make_model.py wrote. Everything listens on
127.0.0.1; what was started is ended. About 6 minutes on two idle cores. Printed, of prompt tokens:

    plan       what the plan counts on: the stated ratio, of sessions in turn divided by instances
    counted    block by block, from empty caches, of the requests in the order of their file
               (tuner/simulate/serving/prefix_hits.py)
    measured   vllm:prefix_cache_hits over vllm:prefix_cache_queries, both instances, this run

The random prompts of vLLM's client are bytes that are no text, so that one common prefix is sent by
AIPerf only.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tests.benchmarks.bars import parse, say
from tests.expect import present
from tuner.config.serve import ServeDecision, ServeRouter
from tuner.engines.files import EmittedFile
from tuner.engines.launchers.benchmark_requests import NAME
from tuner.engines.serve_writers import emit_all_serving
from tuner.goals.serve_plan import plan_deployment
from tuner.goals.serve_spec import read_serve_spec
from tuner.plans.serve import VerifiedServing
from tuner.search.settings import SearchSettings
from tuner.simulate.serving.prefix_hits import by_prefix, in_turn, prefix_hits
from tuner.spec.serving.routers import RouterPolicy
from tuner.spec.serving.traces import Blocks

CHECKOUT: Final = Path(__file__).parents[2]
INSTANCES: Final = 2
FIRST_PORT: Final = 36100
ROUTER_PORT: Final = 36000
METRICS_PORT: Final = "36001"
"""Of the router."""
START_S: Final = 600.0
RUN_S: Final = 900.0
CACHE_BLOCKS: Final = 1_000_000
"""Caches hold all prompts of a run."""
POLICIES: Final = (RouterPolicy.ROUND_ROBIN, RouterPolicy.CACHE_AWARE)
CLIENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "session": ("bench_vllm.sh", "bench_aiperf.sh"),
    "common": ("bench_aiperf.sh",),
}
SEEDS: Final = {"bench_vllm.sh": "--seed", "bench_aiperf.sh": "--random-seed"}
"""Options by which no run sends the prompts of another."""
FLAGS: Final = (
    *("--host", "127.0.0.1", "--load-format", "dummy", "--enforce-eager"),
    # The smallest page of processors; by default theirs have 128 tokens, those of GPUs 16.
    *("--block-size", "32"),
    # vllm-router 0.1.17 asks servers for the tokens of a prompt of text, and follows none without.
    "--enable-scale-out",
)


def spec_text(scope: str, *, requests: int, hit: float) -> str:
    """Return a spec of short answers, whose prompts have a prefix in common."""
    return f"""
schema_version: 1
model: {CHECKOUT}/examples/models/small-moe/config.json
cluster:
  pools:
    - {{name: here, device: cpu, profile: {CHECKOUT}/examples/profiles/epyc-vllm/profile, nodes: 1,
       devices_per_node: {INSTANCES}, memory_per_device: 2GiB, nic: 1GB/s}}
goal:
  kind: serve
  engine: {{name: vllm}}
  traffic: {{concurrency: {INSTANCES}, requests: {requests}, input_tokens: 256, output_tokens: 2,
            prefix_hit: {hit}, prefix_scope: {scope}}}
  slo: {{ttft: {{p90: 10s}}, tpot: {{p90: 500ms}}}}
  max_model_len: 1024
  modes: [aggregated]
emit: [vllm]
"""


def emitted(text: str, policy: RouterPolicy, scratch: Path) -> dict[str, EmittedFile]:
    """Return the scripts of two of the planned instances behind a router of that policy."""
    path = scratch / "spec.yaml"
    path.write_text(text, encoding="utf-8")
    planned = plan_deployment(read_serve_spec(path), (), settings=SearchSettings()).plan
    own = present(planned.decision)
    (group,) = own.instances
    decision = ServeDecision.model_validate(
        own.model_dump()
        | {
            "instances": (group.model_copy(update={"count": INSTANCES}),),
            "router": ServeRouter(
                policy=policy,
                cache_threshold=0.25 if policy is RouterPolicy.CACHE_AWARE else None,
            ),
        }
    )
    verified = VerifiedServing(
        plan=planned,
        decision=decision,
        predicted=present(planned.predicted),
        waived="of a benchmark",
    )
    return {str(file.path): file for file in emit_all_serving(verified)["vllm"]}


def counted_ratio(lines: Sequence[str], *, block_tokens: int, policy: RouterPolicy) -> float:
    """Return the share of the tokens of a file of requests that the caches hold."""
    records = [json.loads(line) for line in lines]
    input_N = np.array([record["input_length"] for record in records])
    ids = [record["hash_ids"] for record in records]
    blocks = Blocks(
        id_B=np.array([one for own in ids for one in own], dtype=np.int64),
        count_N=np.array([len(own) for own in ids], dtype=np.int64),
    )
    place_N = in_turn(len(records), INSTANCES)
    if policy is RouterPolicy.CACHE_AWARE:
        place_N = by_prefix(
            blocks,
            np.arange(len(records), dtype=np.float64),
            instances=INSTANCES,
            cache_blocks=CACHE_BLOCKS,
            stay_s=float(INSTANCES),
        )
    hit_N = prefix_hits(blocks, place_N, cache_blocks=CACHE_BLOCKS) * block_tokens
    return float(np.minimum(hit_N, input_N - 1).sum() / input_N.sum())


def expectations(
    scope: str, policy: RouterPolicy, files: Mapping[str, EmittedFile], *, hit: float
) -> tuple[float, float]:
    """Return the planned and the counted ratio; a common prefix is in both caches at once."""
    if scope == "common":
        return hit, hit
    in_order = policy is RouterPolicy.ROUND_ROBIN
    found = re.search(r"--timed-trace-chunk-hash-size (\d+)", files["bench_vllm.sh"].text)
    lines = files[NAME].text.splitlines()
    counted = counted_ratio(lines, block_tokens=int(present(found)[1]), policy=policy)
    return hit / (INSTANCES if in_order else 1), counted


def counters(ports: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return hits and queries of each instance, in tokens."""
    patterns = [
        re.compile(rf"^vllm:prefix_cache_{name}_total\{{.*\}} (\S+)$", re.MULTILINE)
        for name in ("hits", "queries")
    ]
    texts = [_text(port) for port in ports]
    return np.array([[float(own.findall(text)[0]) for own in patterns] for text in texts])


def _text(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


@contextlib.contextmanager
def running(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    *,
    ports: Sequence[int],
    log: Path,
) -> Iterator[None]:
    """Start servers in sessions of their own, wait for their health checks, and end them.

    Raises:
        RuntimeError: something else listens on a port, or a server ended.
        TimeoutError: one did not answer in time.
    """
    for port in ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise RuntimeError(f"port {port} is in use")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("ab") as output:
            for command, environment in zip(commands, environments, strict=True):
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
        end_s = time.monotonic() + START_S
        while not all(map(_is_ready, ports)):
            if any(process.poll() is not None for process in processes):
                raise RuntimeError(f"a server ended: {log}")
            if time.monotonic() > end_s:
                raise TimeoutError(f"no answer in {START_S:.0f} s: {log}")
            time.sleep(1.0)
        yield
    finally:
        for way in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, way)
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=20)


def _is_ready(port: int) -> bool:
    with contextlib.suppress(urllib.error.URLError, OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        return True
    return False


def results(options: argparse.Namespace, scratch: Path) -> Iterator[dict[str, Any]]:
    """Start the instances once, and yield a row for each router and client."""
    base = {
        **os.environ,
        "PATH": f"{options.vllm}{os.pathsep}{os.environ['PATH']}",
        "MODEL": str(options.model.resolve()),
        "ROUTER_HOST": "127.0.0.1",
        "ROUTER_PORT": str(ROUTER_PORT),
        "BASE_URL": f"http://127.0.0.1:{ROUTER_PORT}",
        "HF_HUB_OFFLINE": "1",
    }
    ports = [FIRST_PORT + 100 * index for index in range(INSTANCES)]
    launches = {
        (scope, policy): emitted(
            spec_text(scope, requests=options.requests, hit=options.hit), policy, scratch
        )
        for scope in CLIENTS
        for policy in POLICIES
        if f"{scope}-{policy}" in options.only
    }
    for (scope, policy), files in launches.items():
        folder = scratch / f"{scope}-{policy}"
        folder.mkdir()
        for name, file in files.items():
            (folder / name).write_text(file.text, encoding="utf-8")
    server = ["bash", str(folder / "aggregated.sh"), *FLAGS]
    own = [
        {**base, "PORT": str(port), "VLLM_CPU_OMP_THREADS_BIND": str(index)}
        for index, port in enumerate(ports)
    ]
    with running([server] * INSTANCES, own, ports=ports, log=scratch / "servers.log"):
        number = 0
        for (scope, policy), files in launches.items():
            folder = scratch / f"{scope}-{policy}"
            plan, counted = expectations(scope, policy, files, hit=options.hit)
            urls = " ".join(f"http://127.0.0.1:{port}" for port in ports)
            for client in CLIENTS[scope]:
                number += 1
                router = ["bash", str(folder / "router.sh"), "--prometheus-port", METRICS_PORT]
                with running(
                    [router],
                    [{**base, "WORKER_URLS": urls}],
                    ports=[ROUTER_PORT],
                    log=folder / "router.log",
                ):
                    before = counters(ports)
                    with (folder / f"{client}.log").open("wb") as output:
                        subprocess.run(
                            ["bash", str(folder / client), SEEDS[client], str(number)],
                            env=base,
                            cwd=folder,
                            stdout=output,
                            stderr=output,
                            check=True,
                            timeout=RUN_S,
                        )
                    after = counters(ports)
                hits, queries = (after - before).sum(axis=0)
                yield {
                    "prefix": scope,
                    "router": policy.value,
                    "client": client,
                    "plan": plan,
                    "counted": counted,
                    "measured": hits / queries,
                    "prompt_tokens": (after - before)[:, 1],
                }


def main() -> None:
    """Launch and print."""
    cases = [f"{scope}-{policy}" for scope in CLIENTS for policy in POLICIES]
    options = parse(
        __doc__,
        {
            "--vllm": {"required": True},
            "--model": {"type": Path, "required": True},
            "--requests": 64,
            "--hit": 0.5,
            "--only": {"nargs": "+", "choices": cases, "default": cases},
        },
    )
    # Ends what was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    scratch = Path(tempfile.mkdtemp(prefix="moetune-session-hits-"))
    sys.stderr.write(f"logs in {scratch}\n")
    for row in results(options, scratch):
        say(
            f"{row['prefix']:8} {row['router']:12} {row['client']:16} plan {row['plan']:6.1%}"
            f"  counted {row['counted']:6.1%}  measured {row['measured']:6.1%}"
            f"  of {' + '.join(f'{one:.0f}' for one in row['prompt_tokens'])} tokens"
        )


if __name__ == "__main__":
    main()

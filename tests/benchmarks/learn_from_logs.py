"""Corrections from the logs of vLLM on this processor, judged under other loads and layouts; run as

    python tests/benchmarks/learn_from_logs.py FOLDER [--minutes 10] [--run-s 60] [--rounds 3]
        [--layouts 2] [--profile examples/profiles/epyc-vllm/profile]

after `bash examples/serving/cpu/run.sh` has made .venv-vllm (or its `setup_vllm` alone). FOLDER
gets the server's logs, the results of vLLM's client, and `runs.json`; what is there already is not
measured again, so that a second run only predicts.

One layout of vLLM 0.32.0 (examples/models/small-moe, random weights, one core) serves one load for
some minutes, whose step log and whose request log are calibrated on, each alone. The other loads
are sent to it as well, all of them in turn in each round, so that what else the machine does falls
on all alike; then the other layouts serve theirs. What is predicted of each run are its own
requests: arrivals and lengths as they were sent.

    error     predicted over measured median of a run, less 1: the median of its absolute values
              over the rounds; without corrections, from steps, from requests, from both
    spread    of the rounds' measured medians: half of largest over smallest less 1
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.benchmarks.bars import say
from tuner.calibrate.server_records import ServerCalibration
from tuner.calibrate.step_corrections import corrected_option
from tuner.cli.backtest_text import server_text
from tuner.engines.metrics.server_log import read_server_logs
from tuner.estimate.serving.estimate import pool_named, surroundings
from tuner.estimate.serving.instance import build_inputs, price_option
from tuner.estimate.serving.registry import read_serving_launch
from tuner.goals.serve_calibration import calibrate_server
from tuner.goals.serve_plan import price_serving_pool, with_residual
from tuner.goals.serve_spec import read_serve_spec
from tuner.prices.serve.corrections import UNCORRECTED, StepCorrections
from tuner.search.serve.options import Option
from tuner.search.serve.simulation import simulate_rank
from tuner.simulate.serving.client import client_observed_ttft_s, engine_client
from tuner.simulate.serving.load import Requests

CHECKOUT: Final = Path(__file__).parents[2]
VLLM: Final = CHECKOUT / ".venv-vllm" / "bin"
CONFIG: Final = CHECKOUT / "examples" / "models" / "small-moe" / "config.json"
PROFILE: Final = CHECKOUT / "examples" / "profiles" / "epyc-vllm" / "profile"
PORT: Final = 8123
INPUT, OUTPUT, RANGE = 200, 24, 0.7
SEEN_RATE: Final = 1.2
RATES: Final = (0.5, 2.0, 3.0)
"""Requests a second of the other loads."""
LAYOUT_RATES: Final = (0.8, 2.0)
LAYOUTS: Final[Mapping[str, str]] = {
    "seen": "--max-num-seqs 16 --max-num-batched-tokens 1024",
    "chunks of 128": "--max-num-seqs 16 --max-num-batched-tokens 128",
    "2 sequences": "--max-num-seqs 2 --max-num-batched-tokens 1024",
    "TP 2": "--max-num-seqs 16 --max-num-batched-tokens 1024 --tensor-parallel-size 2",
}
START_S: Final = 400.0


def command(folder: Path, layout: str) -> str:
    """Return what starts a server."""
    return (
        f"vllm serve {folder / 'small-moe'} --host 127.0.0.1 --port {PORT} --load-format dummy"
        f" --enforce-eager --no-enable-prefix-caching --max-model-len 1024 {LAYOUTS[layout]}"
        " --enable-logging-iteration-details"
    )


def environment(layout: str) -> dict[str, str]:
    """Return the variables of the server and of the client."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {
        "PATH": f"{VLLM}:{kept['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if "TP" in layout else "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@contextmanager
def started(folder: Path, layout: str) -> Iterator[None]:
    """Start a server, with its log in the folder, and end it."""
    with (folder / f"{layout.replace(' ', '-')}.log").open("ab") as log:
        process = subprocess.Popen(
            command(folder, layout).split(),
            env=environment(layout),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        end_s = time.monotonic() + START_S
        while not is_up():
            if process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"{layout}: the server does not start; see its log in {folder}")
            time.sleep(2.0)
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60.0)


def is_up() -> bool:
    """Return whether the server answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2.0):
            return True
    except OSError:
        return False


def send(folder: Path, layout: str, *, name: str, rate: float, seconds: float, seed: int) -> None:
    """Send a load by vLLM's client, unless its result is there."""
    result = folder / f"{name}.json"
    if result.exists():
        return
    prompts = max(round(rate * seconds), 8)
    subprocess.run(
        f"vllm bench serve --backend openai --base-url http://127.0.0.1:{PORT} --model"
        f" {folder / 'small-moe'} --dataset-name random --random-input-len {INPUT}"
        f" --random-output-len {OUTPUT} --random-range-ratio {RANGE} --ignore-eos --num-prompts"
        f" {prompts} --request-rate {rate} --seed {seed} --save-result --save-detailed"
        f" --disable-tqdm --result-filename {result}.part".split(),
        env=environment(layout),
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    Path(f"{result}.part").rename(result)


def run_name(layout: str, rate: float, number: int) -> str:
    """Return the name of a run's result."""
    return f"{layout.replace(' ', '-')}-{rate}-{number}"


def measure(folder: Path, *, minutes: float, run_s: float, rounds: int, layouts: int) -> None:
    """Start every layout once, and send all loads; the calibrating one first."""
    for layout in list(LAYOUTS)[: layouts + 1]:
        rates = RATES if layout == "seen" else LAYOUT_RATES
        names = [run_name(layout, rate, number) for rate in rates for number in range(rounds)]
        if all((folder / f"{name}.json").exists() for name in names):
            continue
        with started(folder, layout):
            send(folder, layout, name="warm-up", rate=2.0, seconds=8.0, seed=99)
            (folder / "warm-up.json").unlink()
            for number in range(rounds):
                if layout == "seen":
                    seen(folder, number, seconds=60.0 * minutes / rounds)
                for rate in rates:
                    name = run_name(layout, rate, number)
                    send(folder, layout, name=name, rate=rate, seconds=run_s, seed=10 + number)
                    say(f"{layout}, {rate}/s, round {number}")


def seen(folder: Path, number: int, *, seconds: float) -> None:
    """Send a round's part of the load that is calibrated on, and keep the steps of it."""
    log = (folder / "seen.log").read_bytes()
    send(folder, "seen", name=f"requests-{number}", rate=SEEN_RATE, seconds=seconds, seed=number)
    with (folder / "steps.log").open("ab") as steps:
        if not number:
            # Of the start what names the model, the release and the cache.
            steps.writelines(line + b"\n" for line in log.splitlines() if b"Iteration(" not in line)
        steps.write((folder / "seen.log").read_bytes()[len(log) :])


def spec_of(folder: Path, profile: Path) -> Path:
    """Write the spec."""
    path = folder / "spec.yaml"
    path.write_text(
        f"schema_version: 1\nmodel: {folder / 'small-moe'}\ncluster:\n  pools:\n"
        f"    - {{name: here, device: cpu, profile: {profile}, nodes: 1, devices_per_node: 2,"
        " memory_per_device: 4GiB, nic: 1GB/s}\n"
        "goal:\n  kind: serve\n  engine: {name: vllm}\n"
        f"  traffic: {{rate: {SEEN_RATE}/s, input_tokens: {INPUT}, output_tokens: {OUTPUT}}}\n"
        "  max_model_len: 1024\n"
    )
    return path


def option_of(folder: Path, spec_path: Path, layout: str) -> Option:
    """Return a layout as it is priced without corrections."""
    spec = read_serve_spec(spec_path)
    pool = pool_named(spec, None)
    read = read_serving_launch(command(folder, layout), surroundings(spec, pool), engine="vllm")
    priced = with_residual(price_serving_pool(pool, (), goal=spec.goal), None)
    return price_option(build_inputs(read, spec=spec, serving_pool=priced), read.setting)


def medians(result: Path) -> tuple[Requests, float, float]:
    """Return the requests of a run, and the medians of TTFT and TPOT that it measured."""
    records = read_server_logs([result]).requests
    requests = Requests(
        input_R=np.array([record.input_tokens for record in records]),
        output_R=np.array([record.output_tokens for record in records]),
        arrival_s_R=np.array([record.arrival_s - records[0].arrival_s for record in records]),
    )
    each_s = [
        (record.end_s - record.arrival_s - record.ttft_s) / (record.output_tokens - 1)
        for record in records
        if record.output_tokens > 1
    ]
    first_s = statistics.median(record.ttft_s for record in records)
    return requests, first_s, statistics.median(each_s)


def predicted(option: Option, steps: StepCorrections, requests: Requests) -> tuple[float, float]:
    """Return the medians of TTFT and TPOT that are predicted of the same requests."""
    priced = corrected_option(option, steps)
    served = simulate_rank(priced, requests, most_running=option.running, concurrency=1)
    first_s_R = client_observed_ttft_s(served, client=engine_client(priced.iteration))
    return float(np.median(first_s_R)), float(np.median(served.tpot_s_R))


def main() -> None:
    """Measure what is not there, calibrate, predict, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--run-s", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layouts", type=int, default=2, help="beside the one seen, at most 3")
    parser.add_argument("--profile", type=Path, default=PROFILE)
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    maker = CHECKOUT / "examples" / "serving" / "cpu" / "make_model.py"
    subprocess.run(
        [VLLM / "python", maker, CONFIG, folder / "small-moe"], env=environment(""), check=True
    )
    measure(
        folder,
        minutes=given.minutes,
        run_s=given.run_s,
        rounds=given.rounds,
        layouts=given.layouts,
    )
    spec_path = spec_of(folder, given.profile.resolve())
    made: dict[str, ServerCalibration] = {}
    requests = [folder / f"requests-{number}.json" for number in range(given.rounds)]
    steps_log = folder / "steps.log"
    sources = {"steps": [steps_log], "requests": requests, "both": [steps_log, *requests]}
    for name, logs in sources.items():
        out = folder / f"corrections-{name}"
        made[name] = calibrate_server(
            spec_path, launch=command(folder, "seen"), observed=logs, out=out
        )
        say(f"\n== from {name}\n{server_text(made[name])}")
    steps = {"without": UNCORRECTED} | {name: one.residual.steps for name, one in made.items()}
    rows = list(judged(folder, spec_path, steps, rounds=given.rounds, layouts=given.layouts))
    (folder / "runs.json").write_text(json.dumps(rows, indent=1))
    print_rows(rows, list(steps))


def judged(
    folder: Path,
    spec_path: Path,
    steps: Mapping[str, StepCorrections],
    *,
    rounds: int,
    layouts: int,
) -> Iterator[dict[str, Any]]:
    """Yield every layout and load, with what was measured and predicted in each round."""
    for layout in list(LAYOUTS)[: layouts + 1]:
        option = option_of(folder, spec_path, layout)
        for rate in RATES if layout == "seen" else LAYOUT_RATES:
            row: dict[str, Any] = {"layout": layout, "rate": rate, "measured": []}
            row |= {name: [] for name in steps}
            for number in range(rounds):
                requests, *measured = medians(folder / f"{run_name(layout, rate, number)}.json")
                row["measured"].append(measured)
                for name, corrections in steps.items():
                    row[name].append(predicted(option, corrections, requests))
            yield row


def print_rows(rows: list[dict[str, Any]], names: list[str]) -> None:
    """Print errors beside each other."""
    say(f"\n{'layout':>14} {'rate':>5} {'':5} {'measured':>9} {'spread':>7} {'  '.join(names)}")
    for row in rows:
        for place, metric in enumerate(("TTFT", "TPOT")):
            seconds = [measured[place] for measured in row["measured"]]
            spread = 0.5 * (max(seconds) / min(seconds) - 1.0)
            errors = [
                statistics.median(
                    abs(said[place] / measured - 1.0)
                    for said, measured in zip(row[name], seconds, strict=True)
                )
                for name in names
            ]
            say(
                f"{row['layout']:>14} {row['rate']:>5} {metric:5}"
                f" {1e3 * statistics.median(seconds):>6.1f} ms {spread:>6.0%} "
                + "  ".join(f"{error:>7.1%}" for error in errors)
            )


if __name__ == "__main__":
    main()

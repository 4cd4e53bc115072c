"""Benchmark clients of deployments, by the name that users type: commands and result files.

    vllm-bench     vllm bench serve --save-result --result-filename {result}
    sglang-bench   python -m sglang.bench_serving --output-file {result}
    aiperf         aiperf profile --artifact-dir {folder}; GenAI-Perf's summary is read too

The commands below are the defaults: the emitted benchmark, with warm-up requests, which clients
exclude from their results, and a different seed for each run, so that no run hits the prefix cache
of another.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final, cast

from profilers.files import TooLargeError, read_bounded
from tuner.engines.metrics.benchmark_result import MAX_RESULT_BYTES, BenchmarkReader
from tuner.engines.metrics.benchmark_run import BenchmarkRun
from tuner.errors import SpecError

RESULT_NAME: Final = "result.json"
"""Value of `{result}`, in the folder of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A benchmark client."""

    name: str
    reader: str
    """Module and function."""
    leaves: tuple[str, ...] = (RESULT_NAME,)
    """Patterns of its result file in the folder of a run, tried in this order."""
    command: str = ""
    """Template of the emitted benchmark; empty if none is emitted."""

    def result(self, folder: Path) -> BenchmarkRun:
        """Read the result of a run from its folder.

        Raises:
            ValueError: there is nothing, it is too large, or not this client's.
        """
        files = (file for pattern in self.leaves for file in sorted(folder.glob(pattern)))
        file = next((path for path in files if path.is_file()), None)
        if file is None:
            raise ValueError(
                f"the client left no {self.leaves[0].rpartition('/')[2]}; does --bench write to"
                " {result} or {folder}, and does --metrics fit it?"
            )
        try:
            content = read_bounded(file, most_bytes=MAX_RESULT_BYTES)
        except TooLargeError as error:
            raise ValueError(
                f"{file.name} is larger than {MAX_RESULT_BYTES} bytes; save no details"
            ) from error
        module, _, function = self.reader.partition(":")
        return cast(BenchmarkReader, getattr(import_module(module), function))(content)


CLIENTS: Final[Mapping[str, Client]] = {
    client.name: client
    for client in (
        Client(
            name="vllm-bench",
            reader="tuner.engines.vllm.metrics:read",
            command=(
                "bash {launch}/bench_vllm.sh --result-filename {result} --num-warmups {warmups}"
                " --seed {seed}"
            ),
        ),
        Client(name="sglang-bench", reader="tuner.engines.sglang.metrics:read"),
        Client(
            name="aiperf",
            reader="tuner.engines.metrics.aiperf:read",
            leaves=(
                RESULT_NAME,
                "**/profile_export_aiperf.json",
                "**/profile_export_genai_perf.json",
            ),
            command=(
                "bash {launch}/bench_aiperf.sh --artifact-dir {folder} --warmup-request-count"
                " {warmups} --random-seed {seed}"
            ),
        ),
    )
}


def find_client(name: str) -> Client:
    """Return the client of a name.

    Raises:
        SpecError: there is none.
    """
    if name not in CLIENTS:
        raise SpecError(
            f"--metrics {name!r}: a deployment is measured by one of {', '.join(CLIENTS)}"
        )
    return CLIENTS[name]

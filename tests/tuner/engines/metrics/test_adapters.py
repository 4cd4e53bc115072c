"""Lines in the form of each engine, filled in from the format strings of its last two releases."""

import itertools
import re
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from tuner.engines.metrics.interface import LogLine, TrialWork
from tuner.errors import SpecError
from tuner.verify.command import ADAPTERS, MAX_LINE, LogReader, find_adapter
from tuner.verify.launches import WARMUP_STEPS

JOB = TrialWork(num_devices=8, samples_per_step=32, tokens_per_step=131_072)


@each_row(
    ("name", "line", "expected"),
    [
        (
            "megatron",
            " [2026-01-02 03:04:05] iteration       12/      20 | consumed samples:       96 |"
            " elapsed time per iteration (ms): 812.5 | learning rate: 1.0E-04 | lm loss: 7.1 |",
            LogLine(step=12, step_s=0.8125),
        ),
        (
            "megatron",
            "[Rank 0] (after 2 iterations) memory (MB) | allocated: 7.0 | max allocated: 512.5 |"
            " reserved: 600.0 | max reserved: 600.0",
            # 512.5 * 2**20.
            LogLine(peak_bytes=537_395_200),
        ),
        (
            "torchtitan",
            "[titan] 2026 - root - INFO - step: 12  loss:  5.10000  grad_norm:  0.9000"
            "  memory: 41.50GiB(51.90%)  tps: 8,192  tflops: 12.00  mfu: 4.00%",
            # 131072 tokens at 8192 per second on each of 8 devices; 41.5 * 2**30.
            LogLine(step=12, step_s=2.0, peak_bytes=44_560_285_696),
        ),
        (
            "torchtitan",
            "step:  2  loss:  5.54421  grad_norm:  0.9000  memory: -0.00GiB(-0.00%)  tps: 1,024"
            "  tflops: 0.01  mfu: 0.00%",
            LogLine(step=2, step_s=16.0),
        ),
        (
            "deepspeed",
            "[INFO] epoch=0/micro_step=12/global_step=6, RunningAvgSamplesPerSec=3.1,"
            " CurrSamplesPerSec=3.2, MemAllocated=1.0GB, MaxMemAllocated=2.5GB",
            # 32 samples at 3.2 per second; 2.5 * 2**30.
            LogLine(step=6, step_s=10.0, peak_bytes=2_684_354_560),
        ),
        (
            "peft",
            "step 12 loss 3.2100 seconds 0.2104 peak_bytes 26636264448",
            LogLine(step=12, step_s=0.2104, peak_bytes=26_636_264_448),
        ),
        (
            "deepspeed",
            "steps: 12 loss: 5.1000 iter time (s): 1.250 samples/sec: 25.600",
            LogLine(step=12, step_s=1.25),
        ),
        (
            # core_v0.19.0 with --log-throughput, --log-energy and the counts of a MoE model.
            "megatron",
            " [2026-08-20 03:04:05.123456] iteration        3/     500 | consumed samples:"
            "         3072 | elapsed time per iteration (ms): 12500.0 | throughput per GPU"
            " (TFLOP/s/GPU): 412.3 | energy per GPU (J/iter/GPU): 6543.2 | power per GPU (W/GPU):"
            " 530.1 | learning rate: 1.000000E-04 | global batch size:  1024 | lm loss:"
            " 1.077813E+01 | load_balancing_loss: 1.001234E+00 | loss scale: 1.0 | grad norm: 2.345"
            " | num zeros: 0 | params norm: 1234.567 | number of skipped iterations:   0 | number"
            " of nan iterations:   0 |",
            LogLine(step=3, step_s=12.5),
        ),
        (
            # core_v0.18.2 after samples were skipped, under torchrun --tee.
            "megatron",
            "[default7]: [2026-07-20 03:04:05.123456] iteration        3/     500 | consumed"
            " samples:         3072 | skipped samples:            8 | elapsed time per iteration"
            " (ms): 900.1 | global batch size:  1024 |",
            LogLine(step=3, step_s=0.9001),
        ),
        (
            # core_v0.19.0 with --log-device-memory-used.
            "megatron",
            "[Rank 24] (after 3 iterations) memory (MB) | allocated: 1024.00 | max allocated:"
            " 2048.00 | reserved: 2100.00 | max reserved: 2200.00 | total device memory used:"
            " 3000.00",
            LogLine(peak_bytes=2**31),
        ),
        (
            # 0.2.2; a quantized model has no MFU.
            "torchtitan",
            "[rank0]:[titan] 2026-08-21 10:00:00,123 - root - INFO - step:  1  loss: 12.12345"
            "  grad_norm:  3.1234  memory:  9.50GiB(12.01%)  tps: 16  tflops: 1,012.34  mfu: N/A",
            # 131072 / (16 * 8); 9.5 * 2**30.
            LogLine(step=1, step_s=1024.0, peak_bytes=10_200_547_328),
        ),
        (
            # 0.19.5 of a slow step, the rate in scientific form.
            "deepspeed",
            "[2026-08-09 10:00:00,123] [INFO] [timer.py:264:stop] epoch=0/micro_step=48/"
            "global_step=3, RunningAvgSamplesPerSec=0.0021, CurrSamplesPerSec=3.2e-05,"
            " MemAllocated=3.11GB, MaxMemAllocated=0.0GB",
            LogLine(step=3, step_s=1e6),
        ),
        (
            # 0.19.5 with a further loss.
            "deepspeed",
            "steps: 3 loss: 10.1234 aux_loss: 0.0123 iter time (s): 0.250 samples/sec: 128.000",
            LogLine(step=3, step_s=0.25),
        ),
        ("jsonl", '{"step_s": 0.5}', LogLine(step_s=0.5)),
        (
            "jsonl",
            '{"step": 3, "step_s": 0.5, "activation_bytes": [3, 2], "peak_bytes": 9, "x": 1}',
            LogLine(step=3, step_s=0.5, activation_bytes=(3, 2), peak_bytes=9),
        ),
        ("regex:took (?P<step_s>[0-9.]+) s", "it took 0.25 s", LogLine(step_s=0.25)),
        (
            r"regex:(?P<step>\d+): (?P<step_s>\S+)",
            "7: 1e-1",
            LogLine(step=7, step_s=0.1),
        ),
    ],
)
def test_a_line_is_read(name: str, line: str, expected: LogLine) -> None:
    assert find_adapter(name)(line, JOB) == expected


def test_what_the_log_itself_says_of_a_step_is_believed() -> None:
    # DeepSpeed 0.19.8 with two tensor ranks: its batch is 8 where the step has 4 samples, and the
    # first two of four steps are not printed: 8 / 8.697... and 8 / 9.994... seconds.
    log = Path(__file__).parent / "logs" / "deepspeed-0.19.8-autotp.txt"
    job = replace(JOB, samples_per_step=4)
    reader = LogReader(log, adapter=find_adapter("deepspeed"), job=job)
    reader.read_on(to_end=True)
    for warmup_steps, left in ((2, 2), (3, 1), (4, 0)):
        assert len(reader.metrics(warmup_steps=warmup_steps, most_steps=9).steps_s) == left
    steps_s = reader.metrics(warmup_steps=2, most_steps=9).steps_s
    assert steps_s == pytest.approx((0.9198, 0.8004), rel=1e-3)


def test_a_log_of_torchtitan_gives_the_seconds_between_its_own_time_stamps() -> None:
    # Two expert-parallel ranks of one machine, both printing five steps of 16 x 256 tokens.
    log = Path(__file__).parent / "logs" / "torchtitan-0.3.0-ep.txt"
    job = replace(JOB, samples_per_step=16, tokens_per_step=16 * 256, num_devices=2)
    reader = LogReader(log, adapter=find_adapter("torchtitan"), job=job)
    reader.read_on(to_end=True)
    result = reader.metrics(warmup_steps=1, most_steps=9)
    stamps = {
        int(step): datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f")
        for stamp, step in re.findall(r"\[titan\] (\S+ \S+) .*step: +(\d+) ", log.read_text())
    }
    between_s = [(b - a).total_seconds() for a, b in itertools.pairwise(stamps.values())]
    assert len(result.steps_s) == 4
    assert result.steps_s == pytest.approx(between_s, rel=0.01)
    assert result.peak_bytes is None


@each_row("name", ("zero3", "zero2-autoep"))
def test_logs_of_deepspeed_give_the_seconds_between_their_own_time_stamps(name: str) -> None:
    # Steps of 16 samples, six of them, the first two not timed by DeepSpeed.
    log = Path(__file__).parent / "logs" / f"deepspeed-0.19.8-{name}.txt"
    job = replace(JOB, samples_per_step=16)
    reader = LogReader(log, adapter=find_adapter("deepspeed"), job=job)
    reader.read_on(to_end=True)
    result = reader.metrics(warmup_steps=2, most_steps=9).steps_s
    stamps = [
        datetime.strptime(line[1:24], "%Y-%m-%d %H:%M:%S,%f")
        for line in log.read_text().splitlines()
        if re.search(r"\] step=\d", line)
    ]
    between_s = [(b - a).total_seconds() for a, b in itertools.pairwise(stamps)]
    assert len(result) == 4, name
    assert result == pytest.approx(between_s[-4:], rel=0.03), name


def test_a_log_of_megatron_lm_gives_the_seconds_between_its_own_time_stamps() -> None:
    # Five steps; the second line has the mean of the first two. Processors keep no peak of memory.
    log = Path(__file__).parent / "logs" / "megatron-core-0.19.0-fsdp.txt"
    reader = LogReader(log, adapter=find_adapter("megatron"), job=JOB)
    reader.read_on(to_end=True)
    result = reader.metrics(warmup_steps=2, most_steps=9)
    stamps = [
        datetime.strptime(line[2:28], "%Y-%m-%d %H:%M:%S.%f")
        for line in log.read_text().splitlines()
        if "iteration  " in line
    ]
    between_s = [(b - a).total_seconds() for a, b in itertools.pairwise(stamps)]
    assert result.steps_s == pytest.approx(between_s[-3:], abs=0.01)
    assert result.peak_bytes is None


@each_row(
    ("name", "line"),
    [
        ("torchtitan", "validate step: 12  loss:  5.1  memory: 41.2GiB(51.9%)  tps: 7,251"),
        ("torchtitan", "step: 12  loss:  5.1  grad_norm: 1  memory: 41.2GiB(51.9%)  tps: 0  x"),
        (
            "megatron",
            " validation loss at iteration 3 on validation set | lm loss value: 1.0E+01 |",
        ),
        ("megatron", "    forward-backward ...............................: (812.41, 815.02)"),
        ("deepspeed", "epoch=0/micro_step=4/global_step=3, vm %: 11.2, swap %: 0.0"),
        ("deepspeed", "[INFO] step=3, skipped=0, lr=[0.0001], mom=[(0.9, 0.999)]"),
        ("jsonl", '{"step_s": -1}'),
        ("jsonl", '{"step_s": NaN}'),
        ("jsonl", '{"step_s": "1"}'),
        ("jsonl", "{" * 2000),
        ("jsonl", "[" * 2000),
        ("jsonl", '{"step_s": 0.5, "activation_bytes": -5}'),
        ("jsonl", '{"step_s": 0.5, "activation_bytes": [5, -5]}'),
        ("jsonl", '{"step_s": 0.5, "activation_bytes": 18446744073709551616}'),
        ("jsonl", '{"step_s": 0.5, "peak_bytes": 18446744073709551616}'),
        ("jsonl", '{"step_s": 1.7e308}'),
        ("jsonl", '{"step_s": 1e8}'),
        ("jsonl", '{"step_s": 5e-324}'),
        ("megatron", "iteration 1/ 2 | elapsed time per iteration (ms): 99999999999999 |"),
        ("megatron", "memory (MB) | allocated: 7.0 | max allocated: 99999999999999999 |"),
        ("torchtitan", "step: 1  memory: 1GiB(1%)  tps: 99999999999999999999999"),
        ("torchtitan", "step: 1  memory: 9999999999999999GiB(1%)  tps: 8"),
        ("deepspeed", "steps: 3 loss: 10.1 iter time (s): 99999999999999999 samples/sec: 1"),
        (
            "deepspeed",
            "micro_step=1/global_step=3, CurrSamplesPerSec=3e-300, MaxMemAllocated=1.0GB",
        ),
        ("regex:(?P<step_s>.*)", "1e300"),
        ("regex:(?P<step_s>.*)", "1e-300"),
        ("regex:(?P<step_s>.*)", "soon"),
        ("regex:(?P<step_s>.*)", "inf"),
    ],
)
def test_what_is_no_step_is_left_alone(name: str, line: str) -> None:
    assert find_adapter(name)(line, JOB) is None


@each_row("name", ADAPTERS)
@given(line=st.text(max_size=200))
@settings(max_examples=40, deadline=None)
def test_no_line_upsets_an_adapter(name: str, line: str) -> None:
    result = find_adapter(name)(line, JOB)
    assert result is None or result.step_s is None or result.step_s >= 0.0


@each_row("name", ADAPTERS)
def test_a_long_line_is_read_in_linear_time(name: str) -> None:
    read = find_adapter(name)
    begin_s = time.process_time()
    for text in (
        "iteration 1/ 1 | ",
        "step:  1 memory: ",
        "steps: 1 loss: ",
        '{"a":',
        "global_step=1,",
    ):
        read((text * MAX_LINE)[:MAX_LINE], JOB)
    # Milliseconds where the time is linear or quadratic in 4096 characters, hours otherwise.
    assert time.process_time() - begin_s < 20.0


@each_row(
    ("name", "said"),
    [
        (
            "tensorboard",
            "is not one of megatron, ms-swift, torchtitan, deepspeed, peft, jsonl,"
            " regex:EXPRESSION",
        ),
        ("regex:(?P<seconds>.*)", "has no group"),
        ("regex:(", "missing )"),
        ("regex:(?P<step_s>(a+)+b)", "can take for ever"),
        ("regex:(?P<step_s>x)" + "y" * 512, "longer than 512"),
    ],
)
def test_an_unusable_way_to_read_is_refused(name: str, said: str) -> None:
    with pytest.raises(SpecError) as raised:
        find_adapter(name)
    assert said in str(raised.value)


def test_a_growing_log_is_read_once_and_warm_up_left_out(tmp_path: Path) -> None:
    file = tmp_path / "log"
    reader = LogReader(file, adapter=find_adapter("jsonl"), job=JOB)
    reader.read_on()
    text = "".join([f'{{"step_s": {step}.5}}\n' for step in range(6)])
    for end in (5, 20, 47, len(text) - 3):
        file.write_text(text[:end])
        reader.read_on()
    # The last line has no end yet.
    assert reader.metrics(warmup_steps=2, most_steps=9).steps_s == (2.5, 3.5, 4.5)
    file.write_text(text[:-1])
    reader.read_on(to_end=True)
    assert reader.metrics(warmup_steps=2, most_steps=9).steps_s == (2.5, 3.5, 4.5, 5.5)
    assert reader.metrics(warmup_steps=2, most_steps=3).steps_s == (2.5, 3.5, 4.5)


def test_ranks_that_say_the_same_step_count_once_and_colours_do_not_matter(tmp_path: Path) -> None:
    file = tmp_path / "log"
    line = "iteration {step}/ 9 | \x1b[31melapsed time per iteration (ms): {time}\x1b[0m |\n"
    told = [line.format(step=step, time=time) for step in (1, 2) for time in (500, 700)]
    file.write_text("".join(told) + "\x00\xff" + "x" * 100_000 + "\n")
    reader = LogReader(file, adapter=find_adapter("megatron"), job=JOB)
    reader.read_on(to_end=True)
    assert reader.metrics(warmup_steps=0, most_steps=9).steps_s == (0.5, 0.5)


def test_torchtitans_colours_are_taken_off(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text(
        "[rank0]:[titan] 2026-08-21 10:00:00,123 - root - INFO - \x1b[31mstep:  3  "
        "\x1b[32mloss:  8.12345  \x1b[38;2;180;60;0mgrad_norm:  1.1234  "
        "\x1b[38;2;54;234;195mmemory: 41.50GiB(51.90%)  \x1b[34mtps: 8,192  "
        "\x1b[36mtflops: 412.00  \x1b[35mmfu: 41.66%\x1b[39m\n"
        "\x1b[33mvalidate step:  3  \x1b[32mloss:  8.1234  \x1b[38;2;54;234;195mmemory: 41.50GiB"
        "(51.90%)  \x1b[34mtps: 1,192\x1b[39m\n"
    )
    reader = LogReader(file, adapter=find_adapter("torchtitan"), job=JOB)
    reader.read_on(to_end=True)
    assert reader.metrics(warmup_steps=0, most_steps=9).steps_s == (2.0,)


def test_the_first_iterations_of_megatron_are_left_out_with_what_carries_them(
    tmp_path: Path,
) -> None:
    # The first takes 9 s and stays in the mean of the second line: (9 + 1) / 2.
    file = tmp_path / "log"
    line = " iteration {:8d}/{:8d} | elapsed time per iteration (ms): {:.1f} |\n"
    times_ms = (9000.0, 5000.0, 1000.0, 1000.0)
    file.write_text("".join(line.format(at, 4, time) for at, time in enumerate(times_ms, 1)))
    reader = LogReader(file, adapter=find_adapter("megatron"), job=JOB)
    reader.read_on(to_end=True)
    assert reader.metrics(warmup_steps=WARMUP_STEPS, most_steps=9).steps_s == (1.0, 1.0)

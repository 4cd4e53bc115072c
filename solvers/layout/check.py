"""Recompute what a layout is worth and name every rule it breaks; trusts no backend.

Plain Python numbers and loops on purpose: the arithmetic is the definition given in `problem.py`,
read line by line, and shares nothing with the code that searches. Bytes are exact integers.

Letters: R runs, O options, S stages, D devices.
"""

from collections.abc import Iterator

from solvers.layout.problem import Layout, LayoutProblem


def violations(problem: LayoutProblem, layout: Layout) -> tuple[str, ...]:
    """Every broken rule as one line with its numbers; empty when the layout is allowed."""
    broken_shape = tuple(_shape_violations(problem, layout))
    if broken_shape:
        return broken_shape
    return (
        *_order_violations(problem, layout),
        *_rule_violations(problem, layout),
        *_memory_violations(problem, layout),
    )


def objective(problem: LayoutProblem, layout: Layout) -> float:
    """Seconds of one optimizer step's pipeline; the formula is in `problem.py`."""
    time_s_D = device_time_s_D(problem, layout)
    slowest = max(time_s_D)
    others = sum(time_s_D) - slowest
    return problem.num_microbatches * slowest + others / problem.stages_per_device


def stage_time_s_S(problem: LayoutProblem, layout: Layout) -> tuple[float, ...]:
    """Seconds of one micro-batch on each stage, forward and backward."""
    return tuple(
        float(problem.fixed_time_s_S[stage])
        + sum(
            count * float(problem.time_s_RO[run, option])
            for run, count in enumerate(layout.layers_SR[stage])
        )
        for stage, option in enumerate(layout.option_S)
    )


def device_time_s_D(problem: LayoutProblem, layout: Layout) -> tuple[float, ...]:
    """Seconds of one micro-batch on each device: the sum over its stages."""
    time_s_D = [0.0] * problem.num_devices
    for device, time_s in zip(
        problem.device_of_stage, stage_time_s_S(problem, layout), strict=True
    ):
        time_s_D[device] += time_s
    return tuple(time_s_D)


def memory_bytes_D(problem: LayoutProblem, layout: Layout) -> tuple[int, ...]:
    """Peak bytes of each device: what stays on all its stages plus the largest transient."""
    resident_D = [0] * problem.num_devices
    transient_D = [0] * problem.num_devices
    for stage, device in enumerate(problem.device_of_stage):
        option = layout.option_S[stage]
        saved = int(problem.fixed_saved_bytes_S[stage])
        resident_D[device] += int(problem.fixed_bytes_S[stage])
        for run, count in enumerate(layout.layers_SR[stage]):
            if not count:
                continue
            resident_D[device] += count * int(problem.static_bytes_R[run])
            saved += count * int(problem.saved_bytes_RO[run, option])
            transient = int(problem.transient_bytes_RO[run, option])
            transient_D[device] = max(transient_D[device], transient)
        resident_D[device] += problem.in_flight_S[stage] * saved
    return tuple(
        layers + transient for layers, transient in zip(resident_D, transient_D, strict=True)
    )


def _shape_violations(problem: LayoutProblem, layout: Layout) -> Iterator[str]:
    stages, runs = problem.num_stages, problem.num_runs
    if len(layout.layers_SR) != stages or len(layout.option_S) != stages:
        yield (
            f"{len(layout.layers_SR)} stages with {len(layout.option_S)} options, "
            f"the pipeline has {stages} stages"
        )
    for stage, layers_R in enumerate(layout.layers_SR):
        if len(layers_R) != runs:
            yield f"stage {stage} counts {len(layers_R)} runs, the model has {runs}"
        if any(count < 0 for count in layers_R):
            yield f"stage {stage} holds a negative number of layers: {layers_R}"
    for stage, option in enumerate(layout.option_S):
        if not 0 <= option < problem.num_options:
            yield f"stage {stage} has option {option}, there are {problem.num_options}"


def _order_violations(problem: LayoutProblem, layout: Layout) -> Iterator[str]:
    for run, length in enumerate(problem.run_lengths):
        placed = sum(layers_R[run] for layers_R in layout.layers_SR)
        if placed != length:
            yield f"run {run} has {length} layers, {placed} are placed"
    furthest_run, its_stage = 0, 0
    for stage, layers_R in enumerate(layout.layers_SR):
        present = [run for run, count in enumerate(layers_R) if count]
        if present and present[0] < furthest_run:
            yield (
                f"stage {stage} holds run {present[0]} after run {furthest_run} "
                f"began on stage {its_stage}"
            )
        if present and present[-1] > furthest_run:
            furthest_run, its_stage = present[-1], stage


def _rule_violations(problem: LayoutProblem, layout: Layout) -> Iterator[str]:
    for stage, layers_R in enumerate(layout.layers_SR):
        layers = sum(layers_R)
        if layers < problem.min_layers_per_stage:
            yield f"stage {stage} holds {layers} layers, at least {problem.min_layers_per_stage}"
        if problem.fixed_layout is not None and layers != problem.fixed_layout[stage]:
            yield f"stage {stage} holds {layers} layers, fixed at {problem.fixed_layout[stage]}"
    if problem.uniform_option and len(set(layout.option_S)) > 1:
        yield f"options {layout.option_S} differ, one option must hold for every stage"


def _memory_violations(problem: LayoutProblem, layout: Layout) -> Iterator[str]:
    for device, needed in enumerate(memory_bytes_D(problem, layout)):
        limit = int(problem.memory_limit_bytes_D[device])
        if needed > limit:
            yield f"device {device} needs {needed} bytes, its limit is {limit}"

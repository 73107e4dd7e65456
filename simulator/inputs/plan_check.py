"""Checks a plan against its job and its cluster, and reports every mismatch with a cure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from operator import mul

from simulator.cluster.cluster import Cluster
from simulator.documents.fields import quote
from simulator.documents.problems import Problem, Problems
from simulator.inputs.model_section import model_tp_problem
from simulator.inputs.plan_file import complete_plan
from simulator.inputs.supply_check import (
    check_devices,
    check_nodes,
    check_supply,
    place_problem,
    places_with_paths,
    pools_by_place,
)
from simulator.models.layers import Model, divisors
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Plan, Stage

REST_MAX = 1 << 16
"""Most samples that are shared out one micro batch at a time."""


def check_plan(
    plan: Plan, job: Job, cluster: Cluster, *, place: str = "plan"
) -> tuple[Problem, ...]:
    """Return every reason why this plan cannot run this job on this cluster.

    ``read_plan`` has already checked the plan's shape. ``place`` names the plan in the problems,
    usually by its file.
    """
    problems = Problems()
    plan = complete_plan(plan, cluster)
    _check_batch(plan, job, place, problems)
    _check_layers(plan, job, place, problems)
    _check_sequence_parallel(plan, job, place, problems)
    _check_outer_steps(plan, place, problems)
    _check_offload(plan, place, problems)
    offers = pools_by_place(cluster)
    unfit = _RepeatedProblems()
    for number, pipeline in enumerate(plan.pipelines):
        where = f"{place}: pipelines[{number}]"
        _check_interleaving(plan, pipeline, where, problems)
        for index, stage in enumerate(pipeline.stages):
            at = f"{where}.stages[{index}]"
            tp = stage.tp
            question = partial(_recompute_problem, stage, job)
            unfit.judge(("recompute", stage.recompute), at, question)
            size = plan.size_of(pipeline)
            question = partial(_split_problem, stage.split, size)
            unfit.judge(("split", stage.split, size), at, question)
            unfit.judge(("tp", tp), at, partial(tp_problem, tp, job))
            for gpu in sorted({each.gpu for each in stage.places}) if stage.offload else ():
                unfit.judge(("offload", gpu), at, partial(_link_problem, gpu, cluster))
            for there, taken in places_with_paths(stage, at):
                question = partial(place_problem, taken, tp, cluster, offers)
                unfit.judge((taken, tp), there, question)
    unfit.report(problems)
    check_supply(plan, cluster, offers, place, problems)
    check_devices(plan, place, problems)
    check_nodes(plan, offers, place, problems)
    return tuple(problems.found)


def check_plan_for_job(plan: Plan, job: Job, *, place: str = "plan") -> tuple[Problem, ...]:
    """Return what is wrong with a plan's batch, layers, TP degrees, sequence parallelism and
    interleaving for a job.
    """
    problems = Problems()
    _check_batch(plan, job, place, problems)
    _check_layers(plan, job, place, problems)
    _check_sequence_parallel(plan, job, place, problems)
    _check_outer_steps(plan, place, problems)
    _check_offload(plan, place, problems)
    unfit = _RepeatedProblems()
    for number, pipeline in enumerate(plan.pipelines):
        _check_interleaving(plan, pipeline, f"{place}: pipelines[{number}]", problems)
        for index, stage in enumerate(pipeline.stages):
            at = f"{place}: pipelines[{number}].stages[{index}]"
            unfit.judge(("tp", stage.tp), at, partial(tp_problem, stage.tp, job))
    unfit.report(problems)
    return tuple(problems.found)


def _check_batch(plan: Plan, job: Job, place: str, problems: Problems) -> None:
    """Check that the micro batches add up to exactly the global batch."""
    sizes, batch = plan.sizes, job.global_batch
    allowed = sizes if job.micro_batches is None else job.micro_batches
    for size in sizes:
        if size not in allowed:
            shown = ", ".join(map(str, allowed))
            cure = f"give one of {shown}, or add it to training.micro_batches in the job"
            where = _where_size(plan, size, place)
            problems.add(where, f"is {size}, which the job rules out", cure)
    if len(sizes) > 1:
        _check_sum(plan, batch, place, problems)
        return
    size = sizes[0]
    if batch % size:
        divisors = [str(n) for n in range(1, min(batch, 4096) + 1) if batch % n == 0]
        shown = ", ".join(divisors[:10]) + (", ..." if len(divisors) > 10 else "")
        what = f"{size} does not divide the global batch of {batch}"
        problems.add(f"{place}: micro_batch_size", what, f"those that do are {shown}")
        return
    counts = [pipeline.micro_batches for pipeline in plan.pipelines]
    given, wanted = sum(counts), batch // size
    if given == wanted:
        return
    difference = abs(given - wanted)
    what = (
        f"{_written_sum(counts)} micro batches of {size} make {given * size} samples, "
        f"{difference * size} too {'many' if given > wanted else 'few'} "
        f"for the global batch of {batch}"
    )
    if wanted < len(counts):
        cure = f"{wanted} micro batches feed at most {wanted} of the {len(counts)} pipelines"
    else:
        cure = f"give micro_batches {_written_list(split_in_proportion(wanted, counts))}"
    problems.add(f"{place}: pipelines", what, cure)


def _where_size(plan: Plan, size: int, place: str) -> str:
    """Where the plan states a micro batch size first."""
    if size == plan.micro_batch_size:
        return f"{place}: micro_batch_size"
    return f"{place}: pipelines[{plan.size_by_pipeline.index(size)}].micro_batch_size"


def _check_sum(plan: Plan, batch: int, place: str, problems: Problems) -> None:
    """Check the samples of pipelines whose micro batches differ in size."""
    given = plan.samples_per_iteration
    if given == batch:
        return
    counts = [pipeline.micro_batches for pipeline in plan.pipelines]
    by_size: Counter[int] = Counter()
    for size, count in zip(plan.size_by_pipeline, counts, strict=True):
        by_size[size] += count
    written = " + ".join(f"{by_size[size]} of {size}" for size in plan.sizes)
    what = (
        f"{written} make {given} samples, {abs(given - batch)} too "
        f"{'many' if given > batch else 'few'} for the global batch of {batch}"
    )
    shares = share_samples(batch, plan.size_by_pipeline, counts)
    cure = "change micro_batch_size of a pipeline: with these sizes no numbers make the batch"
    if shares is not None:
        cure = f"give micro_batches {_written_list(shares)}"
    problems.add(f"{place}: pipelines", what, cure)


def rounded_shares(total: int, weights: Sequence[int] | Sequence[Fraction]) -> list[int]:
    """Divide a total in proportion to exact weights; the largest remainders are rounded up.

    Ties go to the first.
    """
    whole = sum(weights)
    shares = [int(total * part // whole) for part in weights]
    rests = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for index in rests[: total - sum(shares)]:
        shares[index] += 1
    return shares


def split_in_proportion(total: int, weights: list[int]) -> list[int]:
    """Split a total in proportion to the weights, at least one each; ties go to the first."""
    assert total >= len(weights), (total, weights)
    shares = rounded_shares(total, weights)
    owed = shares.count(0)
    shares = [max(share, 1) for share in shares]
    for index in sorted(range(len(shares)), key=lambda i: (-shares[i], i)):
        given = min(owed, shares[index] - 1)
        shares[index] -= given
        owed -= given
    return shares


def share_samples(total: int, sizes: Sequence[int], weights: Sequence[int]) -> list[int] | None:
    """Micro batches of each pipeline, at least one, that add up to exactly ``total`` samples.

    They are in proportion to the weights, as nearly as the sizes allow: what remains is shared out
    in as few micro batches as possible. ``None``: no such numbers were found.
    """
    assert len(sizes) == len(weights), (sizes, weights)
    whole = sum(map(mul, sizes, weights))
    wanted = [Fraction(total * weight, whole) for weight in weights]
    counts = [max(1, round(share)) for share in wanted]
    fewest: list[tuple[int, int]] = [(0, 0)]
    for _ in range(2 * max(sizes) + len(sizes)):
        rest = total - sum(map(mul, sizes, counts))
        if 0 <= rest <= REST_MAX:
            _extend(fewest, rest, sorted(set(sizes)))
            if fewest[rest][0] < REST_MAX:
                break
        # Take back a micro batch no larger than the excess, from the pipeline most above its share.
        able = [i for i, count in enumerate(counts) if count > 1]
        if not able or rest > REST_MAX:
            return None
        least = min(sizes[i] for i in able)
        some = [i for i in able if sizes[i] <= max(-rest, least)]
        counts[max(some, key=lambda i: (sizes[i] * (counts[i] - wanted[i]), -i))] -= 1
    else:
        return None
    while rest:
        size = fewest[rest][1]
        alike = [i for i, each in enumerate(sizes) if each == size]
        counts[max(alike, key=lambda i: (wanted[i] - counts[i], -i))] += 1
        rest -= size
    return counts


def _extend(fewest: list[tuple[int, int]], rest: int, sizes: Sequence[int]) -> None:
    """Note the fewest micro batches that make each number of samples, and the size of one."""
    for number in range(len(fewest), rest + 1):
        ways = [(fewest[number - size][0] + 1, size) for size in sizes if size <= number]
        fewest.append(min(ways, default=(REST_MAX, 0)))


def _written_sum(counts: list[int]) -> str:
    if len(counts) == 1:
        return str(counts[0])
    if len(counts) <= 8:
        return f"{' + '.join(map(str, counts))} = {sum(counts)}"
    return f"{sum(counts)} (over {len(counts)} pipelines)"


def _written_list(counts: list[int]) -> str:
    if len(counts) <= 8:
        return ", ".join(map(str, counts))
    runs = Counter(counts)
    return ", ".join(f"{count} in {times} pipelines" for count, times in sorted(runs.items()))


def _check_layers(plan: Plan, job: Job, place: str, problems: Problems) -> None:
    """Check that the stages of every pipeline hold each layer once, in order.

    Equal pipelines are reported once.
    """
    alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for number, pipeline in enumerate(plan.pipelines):
        alike.setdefault(tuple(stage.layers for stage in pipeline.stages), []).append(number)
    count = len(job.model.layers)
    for ranges, numbers in alike.items():
        also = _also(len(numbers) - 1, "pipeline")
        for index, what, cure in _layer_faults(ranges, count, job.model.name):
            at = f"{place}: pipelines[{numbers[0]}].stages[{index}].layers"
            cover = f"the layers of a pipeline must cover [0, {count}) without gap or overlap"
            problems.add(at, what + also, f"{cure}; {cover}")


def _layer_faults(
    ranges: tuple[tuple[int, int], ...], count: int, model: str
) -> Iterator[tuple[int, str, str]]:
    """Yield index, mistake and cure of each stage whose layer range is wrong."""
    expected = 0
    for index, (first, end) in enumerate(ranges):
        shown = f"[{first}, {end})"
        if first >= count:
            yield index, f"{shown} is beyond the last layer of {model}", "leave the stage out"
            continue
        if first > expected:
            before = (
                "before the first stage" if index == 0 else "between the stage before and this one"
            )
            missing = _layer_words(expected, first)
            yield index, f"{shown} leaves out {missing} {before}", f"start at {expected}"
        elif first < expected:
            twice = _layer_words(first, min(end, expected))
            cure = f"start at {expected}" if expected < end else "leave the stage out"
            yield index, f"{shown} repeats {twice}", cure
        if end > count:
            yield index, f"{shown} ends beyond the last layer of {model}", f"end at {count}"
        expected = max(expected, min(end, count))
    if expected < count:
        first, end = ranges[-1]
        missing = _layer_words(expected, count)
        yield (
            len(ranges) - 1,
            f"[{first}, {end}) leaves out {missing} at the end",
            f"end at {count}",
        )


def _check_sequence_parallel(plan: Plan, job: Job, place: str, problems: Problems) -> None:
    """Check that the ranks of each stage can share the tokens of the job's samples."""
    if not plan.sequence_parallel:
        return
    at, model = f"{place}: sequence_parallel", job.model
    if not shares_tokens(model):
        which = "ranks can share the tokens of built-in language models only"
        what = f"is true, but {which}, not of {model.name}"
        problems.add(at, what, "leave it out")
        return
    if plan.schedule == "zero-bubble":
        problems.add(at, "is true, which is not estimated with zero-bubble", "leave it out")
    degrees = {stage.tp for pipeline in plan.pipelines for stage in pipeline.stages}
    for tp in sorted(degrees):
        if job.sequence % tp:
            what = f"is true, but TP {tp} does not divide samples of {job.sequence} tokens"
            cure = "leave it out, or change the sequence in the job or tp in the plan"
            problems.add(at, what, cure)


def _check_outer_steps(plan: Plan, place: str, problems: Problems) -> None:
    """Check that a plan with outer steps has pipelines that share no zone."""
    if plan.outer_every is not None and len(plan.outer_groups) == 1:
        what = f"is {plan.outer_every}, but all pipelines share zones, so they are one group"
        cure = "leave it out, or keep each pipeline to zones that some others do not use"
        problems.add(f"{place}: outer_every", what, cure)


def _check_offload(plan: Plan, place: str, problems: Problems) -> None:
    """Check that a plan that offloads activations has a schedule with which that is estimated."""
    if plan.offloads and plan.schedule not in ("1f1b", "gpipe"):
        what = f"is {plan.schedule}, with which offload is not estimated"
        problems.add(f"{place}: schedule", what, 'give "1f1b", or leave offload out of the stages')


def _link_problem(gpu: str, cluster: Cluster) -> Problem | None:
    """Return why a GPU kind offloads nothing; unknown kinds are reported elsewhere."""
    known = cluster.catalogue.gpus.get(gpu)
    if known is None or known.host_bytes_per_s is not None:
        return None
    what = f"is given, but it is not known how fast {gpu} copies to its host's memory"
    return Problem("offload", what, f"give host_gbytes_per_s of [gpu.{gpu}] in a catalogue")


def shares_tokens(model: Model) -> bool:
    """Return whether the runtime can share a model's tokens among ranks.

    It knows where the layers of built-in models begin and end their split parts; the head of a
    vision model reads the first token, which one rank would have.
    """
    return model.architecture is not None and not model.is_vision


def _also(more: int, what: str) -> str:
    return f" (and so in {more} more {what}{'s' if more > 1 else ''})" if more else ""


def _layer_words(first: int, end: int) -> str:
    return f"layer {first}" if end - first == 1 else f"layers {first} to {end - 1}"


@dataclass(slots=True)
class _RepeatedProblems:
    """Problems of equal stages, checked once and reported once with the number of repeats.

    A large plan has thousands of stages of a few kinds.
    """

    faults: dict[Hashable, Problem | None] = field(default_factory=dict)
    places: dict[Hashable, list[str]] = field(default_factory=dict)

    def judge(self, kind: Hashable, at: str, question: Callable[[], Problem | None]) -> None:
        if kind not in self.faults:
            self.faults[kind] = question()
        if self.faults[kind] is not None:
            self.places.setdefault(kind, []).append(at)

    def report(self, problems: Problems) -> None:
        for kind, places in self.places.items():
            fault = self.faults[kind]
            assert fault is not None, "only faults have places"
            more = len(places) - 1
            also = _also(more, "stage")
            problems.add(f"{places[0]}.{fault.place}", fault.what + also, fault.cure)


def tp_problem(tp: int, job: Job) -> Problem | None:
    """Return why the job cannot use this TP degree."""
    fault = model_tp_problem(job.model, tp)
    if fault is not None:
        return fault
    if tp > job.max_tp:
        what = f"{tp} is more than the job's largest TP degree of {job.max_tp}"
        return Problem("tp", what, f"set training.max_tp = {tp} in the job, or lower tp")
    if job.max_tp % tp and job.runtime == "sailor":
        what = f"{tp} does not divide the job's largest TP degree of {job.max_tp}"
        return Problem("tp", what, f"use one of {', '.join(map(str, divisors(job.max_tp)))}")
    return None


def _recompute_problem(stage: Stage, job: Job) -> Problem | None:
    # Recomputing more than the job asks for is slower but correct, so it is allowed.
    if job.recompute != "full" or stage.recompute == "full":
        return None
    cure = 'set "recompute": "full", or training.recompute = "auto" in the job'
    return Problem("recompute", f'is {quote(stage.recompute)}, but the job requires "full"', cure)


def _split_problem(split: tuple[int, ...], micro_batch_size: int) -> Problem | None:
    total = sum(split)
    if all(micro_batch_size * share % total == 0 for share in split):
        return None
    shares = ", ".join(map(str, split))
    what = f"[{shares}] does not divide micro batches of {micro_batch_size} into whole samples"
    return Problem("split", what, "the shares' sum must divide the micro batch times each share")


def _check_interleaving(plan: Plan, pipeline: Pipeline, where: str, problems: Problems) -> None:
    """Check that with D device groups, group g has the stages g, g + D, g + 2D, ..."""
    chunks = plan.virtual_stages
    if plan.schedule != "interleaved":
        return
    if len(pipeline.stages) % chunks:
        what = f"has {len(pipeline.stages)} stages, not a multiple of {chunks} virtual stages"
        problems.add(f"{where}.stages", what, "give every device group equally many chunks")
        return
    groups = plan.group_count(pipeline)
    if pipeline.micro_batches % groups:
        what = f"{pipeline.micro_batches} is not a multiple of the {groups} device groups"
        cure = "the interleaved schedule feeds micro batches in rounds of one per device group"
        problems.add(f"{where}.micro_batches", what, cure)
    for index, stage in enumerate(pipeline.stages):
        owner = pipeline.stages[index % groups]
        if (stage.places, stage.tp, stage.split) != (owner.places, owner.tp, owner.split):
            what = f"shares a device group with stages[{index % groups}], whose place differs"
            cure = "give both the same tp, split and place"
            problems.add(f"{where}.stages[{index}]", what, cure)

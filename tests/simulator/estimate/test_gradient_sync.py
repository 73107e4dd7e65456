"""Gradient sync by hand: holders, seconds and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.estimate.gradient_sync import SyncJob, SyncJobs
from simulator.estimate.machine_layout import lay_out
from simulator.hardware.runtime_constants import PLATFORMS, RUNTIMES, platform_of
from simulator.network.curves import Curve, curve_from_bandwidths
from simulator.network.network import MeasuredNetwork
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan
from tests.simulator.worlds import GPUS, ZONES, World, place, small_model, stage, world_of

EAST, WEST, FAR = "us-central1-a", "us-central1-b", "europe-west4-a"
RATE = 1e9
"""Default bandwidth of every link, per flow and in total, in bytes per second."""
BUCKET = RUNTIMES["sailor"].sync_bucket_bytes


def flat(rate: float) -> dict[int, object]:
    """A link with the total bandwidth ``rate`` for any size and number of flows."""
    sizes = (1.0, 1e12)
    return {1: curve_from_bandwidths(1, sizes_bytes=sizes, bytes_per_s=(rate, rate))}


def wires(
    *, within_zone: float = RATE, across: float = RATE, within_node: float = RATE
) -> MeasuredNetwork:
    ends = [(zone, gpu) for zone in ZONES for gpu in GPUS]
    return MeasuredNetwork(
        between={
            (one, other): flat(within_zone if one[0] == other[0] else across)  # type: ignore[misc]  # a pair of ends, as drawn
            for one in ends
            for other in ends
        },
        within={gpu: flat(within_node) for gpu in GPUS},  # type: ignore[misc]  # a pair of ends, as drawn
    )


def job(*, tied: bool = False, **changes: object) -> Job:
    fixed = {
        "name": "fixed",
        "model": small_model(tied=tied),
        "global_batch": 8,
        "sequence": 128,
        "precision": "fp32",
    }
    return Job(**{**fixed, **changes})  # type: ignore[arg-type]  # a test's shorthand


def world(
    measured: MeasuredNetwork | None = None, *, tied: bool = False, **changes: object
) -> World:
    return world_of(job(tied=tied, **changes), measured=measured or wires(), zone_caps={})


def whole(*places: Place, tp: int = 1, tps: tuple[int, ...] | None = None) -> Plan:
    """One pipeline of one stage per place."""
    degrees = tps or (tp,) * len(places)
    layers = len(small_model().layers)
    return Plan(
        1,
        tuple(
            Pipeline(2, (stage(0, layers, where, tp=degree),))
            for where, degree in zip(places, degrees, strict=True)
        ),
    )


def sums(world: World, plan: Plan, *, per_layer: bool = False) -> list[SyncJob]:
    layout = lay_out(plan, world.estimator.facts.machines)
    return SyncJobs(plan, layout, world.costs, world.network).jobs(per_layer=per_layer)


def nodes(count: int, zone: str = EAST, gpu: str = "V100-16") -> list[Place]:
    return [place(gpu, zone, node=f"{zone}-{number}") for number in range(count)]


def held_bytes(world: World, *, tp: int = 1) -> float:
    return 4.0 * float(world.costs.parameters(tp).sum())


EFFICIENCY = platform_of("V100-16").ring_efficiency


# Rings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [2, 3, 4, 7])
def test_ring_moves_twice_its_share(members: int) -> None:
    """2 (D - 1) / D of the gradients' bytes over the link's rate."""
    here = world()
    (only,) = sums(here, whole(*nodes(members)))
    by_hand = 2 * (members - 1) / members * held_bytes(here) / RATE / EFFICIENCY
    assert only.algorithm == "ring"
    assert only.seconds == pytest.approx(by_hand, rel=1e-9)
    assert only.layers == (0, len(small_model().layers))
    assert len(only.holders) == members


def test_single_pipeline_has_no_sync() -> None:
    assert sums(world(), whole(*nodes(1))) == []


def test_each_bucket_pays_latency() -> None:
    """The rest beyond full buckets is a separate message with its own latency."""
    sizes, latency = (1e3, 1e9), 1e-3
    slow_start = {1: curve_from_bandwidths(
        1, sizes_bytes=sizes, bytes_per_s=tuple(s / (latency + s / RATE) for s in sizes)
    )}  # fmt: skip
    end = (EAST, "V100-16")
    here = world(MeasuredNetwork(between={(end, end): slow_start}))
    size = held_bytes(here)
    assert size < BUCKET
    (only,) = sums(here, whole(*nodes(2)))
    assert only.seconds == pytest.approx(2 * (latency + size / 2 / RATE) / EFFICIENCY)
    runtime = replace(here.costs.runtime, sync_bucket_bytes=size / 2.5)
    here.costs.runtime = runtime
    (cut,) = sums(here, whole(*nodes(2)))
    assert cut.seconds == pytest.approx(2 * (3 * latency + size / 2 / RATE) / EFFICIENCY)


def test_runtime_sets_the_width_of_16_bit_gradients() -> None:
    """Sailor's runtime reduces in fp32 in any precision; Megatron's in the job's precision."""
    fp32, bf16, megatron = (
        sums(world(precision=precision, runtime=runtime), whole(*nodes(2)))[0].seconds
        for precision, runtime in (
            ("fp32", "sailor"),
            ("bf16", "sailor"),
            ("bf16", "megatron-deepspeed"),
        )
    )
    assert bf16 == fp32
    assert megatron == pytest.approx(fp32 / 2)


def test_tp_ranks_share_their_machines_nic() -> None:
    """Four ranks with a quarter each take as long as one, apart from tensors not split."""
    here = world(max_tp=4)
    one, four = (sums(here, whole(*nodes(2), tp=tp))[0].seconds for tp in (1, 4))
    copies = 4 * held_bytes(here, tp=4) / held_bytes(here, tp=1)
    assert 1 < copies < 1.2  # Norms and biases are held by each rank.
    assert four == pytest.approx(one * copies, rel=1e-9)


def test_holders_of_different_tp_use_the_smaller_degree() -> None:
    """Between TP 4 and TP 1 one flow carries the whole, between two of TP 4 four a part each.

    The latter is the slowest hop: four ranks carry what they all hold four times.
    """
    here = world(max_tp=4)
    ones, fours, mixed, pair = (
        sums(here, whole(*nodes(len(tps)), tps=tps))[0].seconds
        for tps in ((1, 1, 1), (4, 4, 4), (4, 4, 1), (4, 1, 1))
    )
    assert fours > ones
    assert mixed == pytest.approx(fours, rel=1e-9)
    assert pair == pytest.approx(ones, rel=1e-9)


def test_rings_of_stages_on_one_machine_share_its_nic() -> None:
    """Two stages of each pipeline are on one machine: their rings share its NIC."""
    here = world()
    layers = len(small_model().layers)

    def plan(second: str) -> Plan:
        return Plan(
            1,
            tuple(
                Pipeline(
                    2,
                    (
                        stage(0, 3, place(node=f"n{p}")),
                        stage(3, layers, place(node=f"{second}{p}")),
                    ),
                )
                for p in range(2)
            ),
        )

    together, apart = sums(here, plan("n")), sums(here, plan("m"))
    assert [one.layers for one in together] == [(3, layers), (0, 3)]
    for close, far in zip(together, apart, strict=True):
        assert close.seconds == pytest.approx(2 * far.seconds, rel=1e-9)


def test_ring_inside_a_machine_uses_its_internal_links() -> None:
    here = world(wires(within_node=50e9))
    inside = sums(here, whole(*[place(node="n")] * 2))[0].seconds
    assert inside == pytest.approx(held_bytes(here) / 50e9, rel=1e-9)


def test_ring_is_as_slow_as_its_slowest_hop() -> None:
    slow = wires()
    ends = ((EAST, "T4"), (EAST, "V100-16"))
    for pair in (ends, ends[::-1]):
        slow.between[pair] = flat(RATE / 8)  # type: ignore[index]  # made by this test, and mutable
    here = world(slow)
    quick = sums(here, whole(*nodes(4)))[0].seconds
    mixed = sums(here, whole(*nodes(3), place("T4", node="t")))[0].seconds
    ratio = platform_of("V100-16").ring_efficiency / platform_of("T4").ring_efficiency
    assert mixed == pytest.approx(8 * ratio * quick, rel=1e-9)


# Holders -------------------------------------------------------------------------------------


def test_layers_are_reduced_between_their_holders() -> None:
    """Boundaries at 2 and 4: three runs of layers, each between its own pair of groups."""
    here = world()
    layers = len(small_model().layers)
    a, b = nodes(2), nodes(2, gpu="T4")
    plan = Plan(
        1,
        (
            Pipeline(2, (stage(0, 2, a[0]), stage(2, layers, a[1]))),
            Pipeline(2, (stage(0, 4, b[0]), stage(4, layers, b[1]))),
        ),
    )
    found = {one.layers: set(one.holders) for one in sums(here, plan)}
    assert found == {
        (0, 2): {(0, 0, 0), (1, 0, 0)},
        (2, 4): {(0, 1, 0), (1, 0, 0)},
        (4, layers): {(0, 1, 0), (1, 1, 0)},
    }
    by_layer = sums(here, plan, per_layer=True)
    assert [one.layers for one in by_layer] == [(i, i + 1) for i in reversed(range(layers))]


def test_sync_per_layer_takes_as_long_as_together_without_latency() -> None:
    here = world()
    plan = whole(*nodes(3))
    (together,) = sums(here, plan)
    one_by_one = sums(here, plan, per_layer=True)
    assert sum(one.seconds for one in one_by_one) == pytest.approx(together.seconds, rel=1e-9)


def test_split_stage_reduces_between_its_groups() -> None:
    here = world()
    layers = len(small_model().layers)
    a = nodes(3)
    plan = Plan(2, (Pipeline(2, (stage(0, 3, a[0], a[1]), stage(3, layers, a[2]))),))
    (only,) = sums(here, plan)
    assert (only.layers, set(only.holders)) == ((0, 3), {(0, 0, 0), (0, 0, 1)})


# A tensor that two layers share ----------------------------------------------------------------


def test_tied_parameters_are_reduced_once() -> None:
    """Data-parallel replicas reduce each parameter once, tied ones included."""
    here = world(tied=True)
    found = sums(here, whole(*nodes(2)))
    parameters = small_model(tied=True).parameters
    assert [one.algorithm for one in found] == ["ring", "tied"]
    total = sum(one.seconds for one in found)
    assert total == pytest.approx(4 * parameters / RATE / EFFICIENCY, rel=1e-9)
    by_layer = sums(here, whole(*nodes(2)), per_layer=True)
    assert sum(one.seconds for one in by_layer) == pytest.approx(total, rel=1e-9)
    # Over zones the bytes that are paid for are those of the parameters, too.
    crossing = sums(here, whole(*nodes(1), *nodes(1, WEST)))
    paid = sum(size for one in crossing for _, size in one.egress_bytes)
    assert paid == pytest.approx(2 * 4 * parameters, rel=1e-9)


def test_first_and_last_stage_reduce_their_tied_tensor() -> None:
    here = world(tied=True)
    layers = len(small_model().layers)
    a = nodes(3)
    one = Pipeline(2, (stage(0, 1, a[0]), stage(1, 3, a[1]), stage(3, layers, a[2])))
    (tied,) = sums(here, Plan(1, (one,)))
    assert tied.algorithm == "tied"
    assert set(tied.holders) == {(0, 0, 0), (0, 2, 0)}
    shared = 512 * 64
    assert tied.seconds == pytest.approx(4 * shared / RATE / EFFICIENCY, rel=1e-9)
    two = sums(here, Plan(1, (one, one)))
    assert set(two[-1].holders) == {(p, s, 0) for p in (0, 1) for s in (0, 2)}
    assert sums(world(), Plan(1, (one,))) == []  # Nothing is shared in an untied model.


# Over zones ----------------------------------------------------------------------------------


def across_zones(per_zone: int, *zones: str) -> Plan:
    return whole(*[where for zone in zones for where in nodes(per_zone, zone)])


def test_hierarchical_sync_crosses_a_slow_zone_link_once() -> None:
    """Four replicas in each of two zones, by hand.

    The ring crosses the slow way with 2 x 7/8 of all bytes. In two steps, each zone reduces and
    gathers its own (2 x 3/4 of the bytes at full rate), and four shards of a quarter cross at
    the same time from four machines: 2 x 1/2 x 1/4 each.
    """
    here = world(wires(across=RATE / 10))
    (only,) = sums(here, across_zones(4, EAST, WEST))
    size = held_bytes(here)
    by_hand = 2 * 3 / 4 * size / RATE + size / 4 / (RATE / 10)
    ring = 2 * 7 / 8 * size / (RATE / 10)
    assert by_hand < ring
    assert only.algorithm == "hierarchical"
    assert only.seconds == pytest.approx(by_hand / EFFICIENCY, rel=1e-9)


def test_plain_ring_is_faster_with_equal_links() -> None:
    (only,) = sums(world(), across_zones(1, EAST, WEST, FAR))
    assert only.algorithm == "ring"


def test_shards_that_leave_one_machine_share_its_nic() -> None:
    """Four replicas on one machine in each zone: their four shards cross one network card.

    Together they carry all the bytes over it; counted apart they would take a quarter as long.
    """
    here = world(wires(across=RATE / 10, within_node=1e15))
    plan = whole(*[place(node="e")] * 4, *[place(zone=WEST, node="w")] * 4)
    (only,) = sums(here, plan)
    by_hand = held_bytes(here) / (RATE / 10) / EFFICIENCY
    assert only.algorithm == "hierarchical"
    assert only.seconds == pytest.approx(by_hand, rel=1e-6)


def test_rings_between_two_zones_share_their_bandwidth() -> None:
    """Two stages on machines of their own, each with a replica in either zone."""
    cap = RATE / 4
    capped = world_of(job(), measured=wires(), zone_caps={(EAST, WEST): cap, (WEST, EAST): cap})
    layers = len(small_model().layers)
    east, west = nodes(2, EAST), nodes(2, WEST)
    plan = Plan(
        1, tuple(Pipeline(2, (stage(0, 3, a), stage(3, layers, b))) for a, b in (east, west))
    )
    size = {
        cut: 4.0 * float(capped.costs.parameters(1)[slice(*cut)].sum())
        for cut in ((0, 3), (3, layers))
    }
    for one in sums(capped, plan):
        assert one.seconds == pytest.approx(2 * size[one.layers] / cap / EFFICIENCY, rel=1e-9)


def test_egress_by_hand() -> None:
    """A ring of n over two zones crosses twice, each time with 2 (n - 1) / n of the bytes."""
    here = world()
    size = held_bytes(here)
    (ring,) = sums(here, across_zones(2, EAST, WEST))
    assert ring.algorithm == "ring"
    crossing = 2 * 3 / 4 * size
    assert dict(ring.egress_bytes) == pytest.approx(
        {(EAST, WEST): crossing, (WEST, EAST): crossing}
    )
    (staged,) = sums(world(wires(across=RATE / 50)), across_zones(4, EAST, WEST))
    assert staged.algorithm == "hierarchical"
    # Each zone sends half of all bytes twice: the sum of its half there, the other half back.
    assert dict(staged.egress_bytes) == pytest.approx({(EAST, WEST): size, (WEST, EAST): size})
    (three,) = sums(world(wires(across=RATE / 50)), across_zones(4, EAST, WEST, FAR))
    assert three.algorithm == "hierarchical"
    assert sum(dict(three.egress_bytes).values()) == pytest.approx(3 * 2 * 2 / 3 * size)
    (home,) = sums(here, whole(*nodes(3)))
    assert home.egress_bytes == ()


def test_estimate_charges_exactly_the_egress_bytes() -> None:
    """Per iteration and direction: the bytes of sync, plus a boundary's per micro batch."""
    price = 1e-10
    prices = {(a, b): price for a in ZONES for b in ZONES if a != b}
    here = world(replace(wires(), egress_usd_per_byte=prices))
    layers = len(small_model().layers)
    a, b = nodes(2, EAST), nodes(2, WEST)
    sums_only = here.estimator.estimate(across_zones(1, EAST, WEST)).money.egress_usd
    assert sums_only == pytest.approx(2 * held_bytes(here) * price)
    split = Plan(2, (Pipeline(5, (stage(0, 3, a[0]), stage(3, layers, b[0]))),))
    boundary = 2 * 128 * 64 * 4  # samples, tokens, width, bytes
    money = here.estimator.estimate(split).money
    assert dict(money.by_egress_usd) == pytest.approx(
        {f"{EAST} -> {WEST}": 5 * boundary * price, f"{WEST} -> {EAST}": 5 * boundary * price}
    )


# ZeRO-1 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [2, 3])
def test_owners_broadcast_fp32_weights_around_the_ring(members: int) -> None:
    """Four bytes of each weight over the slowest hop, whatever precision gradients have."""
    here = world(zero=1, precision="bf16", gradient_bytes=2)
    (only,) = [job.broadcast for job in sums(here, whole(*nodes(members))) if job.broadcast]
    assert only.seconds == pytest.approx(held_bytes(here) / RATE / EFFICIENCY)
    for other in (world(), world(zero=1, runtime="megatron-deepspeed")):
        assert sums(other, whole(*nodes(members)))[0].broadcast is None


@pytest.mark.usefixtures("on_gloo")
@pytest.mark.parametrize(("members", "levels"), [(2, 1), (4, 2), (5, 3)])
def test_gloo_passes_whole_tensors_down_a_tree(members: int, levels: int) -> None:
    here = world(zero=1)
    (only,) = [job.broadcast for job in sums(here, whole(*nodes(members))) if job.broadcast]
    assert only.seconds == pytest.approx(levels * held_bytes(here) / RATE)


def test_broadcasts_follow_the_step_and_are_paid_for() -> None:
    """They begin when the slowest owner is done, and send as much as the sums for them."""
    prices = dict.fromkeys(((a, b) for a in ZONES for b in ZONES if a != b), price := 1e-10)
    plan, costs = across_zones(1, EAST, WEST), replace(wires(), egress_usd_per_byte=prices)
    plain, sharded = (world(costs, zero=zero) for zero in (0, 1))
    before, after = (here.estimator.details(plan) for here in (plain, sharded))
    sent = [(start, one) for start, one in after.sync if one.algorithm == "broadcast"]
    updated_s = max(after.step_end.values())
    assert len(sent) == len(after.sync) / 2 == len(before.sync)
    assert min(start for start, _ in sent) == updated_s
    sending = sum(one.seconds for _, one in sent)
    assert sending == pytest.approx(held_bytes(sharded) / RATE / EFFICIENCY)
    found = sharded.estimator.estimate(plan)
    fixed = platform_of("V100-16").iteration_s
    assert found.iteration_s == pytest.approx(updated_s + sending + fixed)
    assert found.money.egress_usd == pytest.approx((1 + 1) * held_bytes(sharded) * price)


# Gloo ----------------------------------------------------------------------------------------


@pytest.fixture
def on_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        PLATFORMS, "V100-16", replace(platform_of("V100-16"), transport="gloo", ring_efficiency=1.0)
    )


LATENCY_S = 0.01


def far_apart() -> MeasuredNetwork:
    """Links whose least message takes 10 ms between zones, and none within."""
    ends = [(zone, gpu) for zone in ZONES for gpu in GPUS]

    def link(seconds: float) -> dict[int, Curve]:
        return {1: Curve(1, (1.0, 1e12), (seconds, seconds + 1e12 / RATE))}

    return MeasuredNetwork(
        between={
            (one, other): link(0.0 if one[0] == other[0] else LATENCY_S)
            for one in ends
            for other in ends
        }
    )


@pytest.mark.usefixtures("on_gloo")
def test_each_step_of_gloos_ring_waits_until_the_receiver_is_ready():
    here = world(far_apart())
    (found,) = sums(here, whole(*nodes(1), *nodes(1, WEST)))
    sent_s = held_bytes(here) / 2 / RATE
    assert found.seconds == pytest.approx(2 * (2 * LATENCY_S + sent_s))


@pytest.mark.usefixtures("on_gloo")
def test_gloos_ring_follows_the_ranks_and_crosses_zones_as_often_as_they_do():
    one, other = nodes(2)
    west = nodes(2, WEST)
    here = world(far_apart())
    alternating, sorted_ = (
        sums(here, whole(*places))[0]
        for places in ((one, west[0], other, west[1]), (one, other, *west))
    )
    assert alternating.algorithm == sorted_.algorithm == "ring"
    assert alternating.seconds == sorted_.seconds  # The slowest hop counts at every step.
    assert sum(size for _, size in alternating.egress_bytes) == pytest.approx(
        2 * sum(size for _, size in sorted_.egress_bytes)
    )


@pytest.mark.parametrize(("gloo", "at_once"), [(True, True), (False, False)])
def test_sums_of_different_ranks_run_at_once_on_gloo(request, gloo, at_once):
    if gloo:
        request.getfixturevalue("on_gloo")
    layers = len(small_model().layers)
    here, (there,) = nodes(3), nodes(1, WEST)
    plan = Plan(
        1,
        (
            Pipeline(2, (stage(0, 1, here[0]), stage(1, layers, here[1]))),
            Pipeline(2, (stage(0, 2, here[2]), stage(2, layers, there))),
        ),
    )
    found = world(far_apart()).estimator.details(plan).sync
    # The last layers of the first pipeline's second stage are far away, layer 1 is near.
    far = max(start + each.seconds for start, each in found if each.layers[0] >= 2)
    near = next(start for start, each in found if each.layers[0] == 1)
    assert (near < far) is at_once


@pytest.mark.usefixtures("on_gloo")
def test_a_step_on_gloo_ends_with_a_vote_of_all_ranks():
    near, far = (world(far_apart()).estimator.estimate(whole(*nodes(1), other))
                 for other in (nodes(2)[1], *nodes(1, WEST)))  # fmt: skip
    layers_s = len(small_model().layers) * 2 * 2 * LATENCY_S
    vote_s = 2 * 2 * LATENCY_S
    assert far.iteration_s - near.iteration_s == pytest.approx(layers_s + vote_s, rel=0.05)

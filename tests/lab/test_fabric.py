"""The arithmetic of the switch, in its own time: no clock, no device, exact numbers."""

from __future__ import annotations

import math
import random

import pytest

from weft.lab.fabric import Delivery, Fabric
from weft.lab.network import Host, Network, Route

MBIT = 1e6
PACKET = bytes(12_500)  # 100,000 bits: 1 ms at 100 Mbit/s


def network(
    num_hosts: int = 2,
    *,
    rate: float = 100 * MBIT,
    upload: float | None = None,
    delay_s: float = 0.0,
    jitter_s: float = 0.0,
    loss: float = 0.0,
    trunk: float | None = None,
    over_trunk: set[tuple[int, int]] | None = None,
) -> Network:
    host = Host(ranks=1, upload_bits_per_s=upload or rate, download_bits_per_s=rate, compute=0.0)
    pairs = [(a, b) for a in range(num_hosts) for b in range(num_hosts) if a != b]
    routes = {
        pair: Route(
            delay_s=delay_s,
            jitter_s=jitter_s,
            loss=loss,
            trunk=0 if trunk is not None and (over_trunk is None or pair in over_trunk) else None,
        )
        for pair in pairs
    }
    return Network(hosts=(host,) * num_hosts, routes=routes, trunks=() if trunk is None else (trunk,), mtu_bytes=65000)


def send(fabric: Fabric, count: int, *pairs: tuple[int, int]) -> None:
    """Packets between each pair at time 0, in turns."""
    for _ in range(count):
        for source, destination in pairs:
            fabric.send(0.0, source, destination, PACKET)


def drain(fabric: Fabric, until_s: float = math.inf) -> list[Delivery]:
    arrived = []
    while fabric.next_s() < until_s:
        arrived += fabric.advance(fabric.next_s())
    return arrived


def times(arrived: list[Delivery]) -> list[float]:
    return [each.due_s for each in arrived]


def test_a_packet_takes_its_size_over_the_rate_once_and_the_delay() -> None:
    fabric = Fabric(network(delay_s=0.025))
    fabric.send(5.0, 0, 1, PACKET)
    (arrived,) = drain(fabric)
    assert arrived.due_s == pytest.approx(5.0 + 0.001 + 0.025)
    assert (arrived.source, arrived.destination, arrived.packet) == (0, 1, PACKET)


def test_departures_are_serialised() -> None:
    fabric = Fabric(network(delay_s=0.01))
    send(fabric, 50, (0, 1))
    assert times(drain(fabric)) == pytest.approx([0.01 + 0.001 * (n + 1) for n in range(50)])


def test_the_slower_of_two_lines_decides() -> None:
    for upload, rate in ((10 * MBIT, 100 * MBIT), (100 * MBIT, 10 * MBIT)):
        fabric = Fabric(network(upload=upload, rate=rate))
        send(fabric, 3, (0, 1))
        assert times(drain(fabric)) == pytest.approx([0.01, 0.02, 0.03])


def test_lines_are_full_duplex() -> None:
    fabric = Fabric(network())
    send(fabric, 10, (0, 1), (1, 0))
    assert max(times(drain(fabric))) == pytest.approx(0.010)


def test_senders_share_the_receivers_line() -> None:
    fabric = Fabric(network(3))
    send(fabric, 10, (0, 2), (1, 2))
    arrived = drain(fabric)
    assert times(arrived) == pytest.approx([0.001 * (n + 1) for n in range(20)])
    assert {each.source for each in arrived[:4]} == {0, 1}  # neither waits for the other to finish


def test_a_slow_receiver_does_not_hold_up_others() -> None:
    """A packet reserves the receiver's line when it gets there, not when it is sent."""
    fabric = Fabric(network(3))
    send(fabric, 100, (0, 2))  # host 0's own line is busy for 100 ms
    fabric.send(0.0, 1, 2, PACKET)
    assert next(each.due_s for each in drain(fabric) if each.source == 1) <= 0.0021


def test_a_trunk_is_shared_by_its_ways_only() -> None:
    over = {(0, 2), (1, 3)}
    fabric = Fabric(network(4, trunk=50 * MBIT, over_trunk=over))
    send(fabric, 10, (0, 2), (1, 3), (2, 0))
    arrived = drain(fabric)
    last = {pair: max(e.due_s for e in arrived if (e.source, e.destination) == pair) for pair in (*over, (2, 0))}
    assert max(last[0, 2], last[1, 3]) == pytest.approx(20 * 0.002)
    assert min(last[0, 2], last[1, 3]) > 18 * 0.002
    assert last[2, 0] == pytest.approx(0.010)


def test_a_full_queue_drops_at_its_tail() -> None:
    net = network(rate=8 * MBIT)  # a byte a microsecond
    fabric = Fabric(net)
    for number in range(200):
        fabric.send(0.0, 0, 1, number.to_bytes(2, "big") + PACKET)
    arrived = drain(fabric)
    kept = net.queue_bytes(8 * MBIT) // (len(PACKET) + 2) + 1  # the first is under route, not queued
    assert len(arrived) == kept and len(fabric.drops) == 200 - kept
    assert [int.from_bytes(each.packet[:2], "big") for each in arrived] == list(range(kept))
    assert not any(drop.by_chance for drop in fabric.drops)
    fabric.send(10.0, 0, 1, PACKET)  # it has room again
    assert len(drain(fabric)) == 1


def test_an_urgent_packet_overtakes_the_queue_but_takes_its_time() -> None:
    fabric = Fabric(network(delay_s=0.005))
    send(fabric, 10, (0, 1))
    fabric.send(0.0, 0, 1, bytes(52), urgent=True)
    fabric.send(0.0, 0, 1, PACKET)
    arrived = drain(fabric)
    assert len(arrived[0].packet) == 52 and arrived[0].due_s == pytest.approx(0.005 + 52 * 8 / (100 * MBIT))
    assert arrived[-1].due_s == pytest.approx(0.005 + 0.011 + 52 * 8 / (100 * MBIT))


def test_lateness_does_not_add_up() -> None:
    """Whoever turns the crank late finds every packet at its own time."""
    fabric = Fabric(network())
    send(fabric, 100, (0, 1))
    arrived = fabric.advance(0.0503) + fabric.advance(1.0)
    assert times(arrived) == pytest.approx([0.001 * (n + 1) for n in range(100)])


def test_the_switchs_own_latency_is_taken_off() -> None:
    for delay_s, expected_s in ((0.010, 0.0098), (0.0001, 0.0)):
        fabric = Fabric(network(rate=math.inf, delay_s=delay_s), latency_s=0.0002)
        fabric.send(0.0, 0, 1, PACKET)
        assert times(drain(fabric)) == pytest.approx([expected_s])


def test_jitter_is_even_around_the_delay_and_keeps_order() -> None:
    fabric = Fabric(network(rate=math.inf, delay_s=0.010, jitter_s=0.004))
    for number in range(2000):
        fabric.send(number * 1.0, 0, 1, PACKET)
    delays = [each.due_s % 1.0 for each in drain(fabric)]
    assert 0.006 <= min(delays) < 0.0061 and 0.0139 < max(delays) <= 0.014
    assert sum(delays) / len(delays) == pytest.approx(0.010, rel=0.02)
    for number in range(100):
        fabric.send(3000.0 + number * 1e-5, 0, 1, bytes([number]))
    assert [each.packet[0] for each in drain(fabric)] == list(range(100))


def test_loss_takes_its_share_and_is_the_same_every_time() -> None:
    lost = []
    for _ in range(2):
        fabric = Fabric(network(rate=math.inf, loss=0.1))
        for number in range(5000):
            fabric.send(float(number), 0, 1, number.to_bytes(2, "big"))
        arrived = {each.packet for each in drain(fabric)}
        assert len(arrived) + len(fabric.drops) == 5000 and all(drop.by_chance for drop in fabric.drops)
        assert 400 < len(fabric.drops) < 600
        lost.append(arrived)
    assert lost[0] == lost[1]


def test_every_packet_arrives_once_or_is_dropped() -> None:
    rng = random.Random(1)
    fabric = Fabric(network(4, delay_s=0.003, jitter_s=0.002, loss=0.05, trunk=30 * MBIT, over_trunk={(0, 1), (2, 3)}))
    num_sent, arrived = 0, 0
    for step in range(3000):
        now_s = step * 1e-4
        source, destination = rng.sample(range(4), 2)
        fabric.send(now_s, source, destination, bytes(rng.randrange(20, 40_000)))
        num_sent += 1
        arrived += len(fabric.advance(now_s))
    assert any(not drop.by_chance for drop in fabric.drops)
    assert arrived + len(drain(fabric)) + len(fabric.drops) == num_sent

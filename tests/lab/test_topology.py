"""A network from words: quantities, presets, files and flags; everything wrong with them at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.errors import LaunchError
from weft.lab.network import host_address, host_number, problems_of_machine
from weft.lab.quantities import format_rate, parse_rate, parse_share, parse_time
from weft.lab.topology import make_network, presets


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_rate, "100Mbit", 100e6),
        (parse_rate, "1.5 Gbit/s", 1.5e9),
        (parse_rate, "10Mbps", 10e6),
        (parse_rate, "64kbit", 64e3),
        (parse_rate, "unlimited", math.inf),
        (parse_rate, "0Mbit", None),
        (parse_rate, "-1Mbit", None),
        (parse_rate, "12MB", None),
        (parse_rate, 100, None),
        (parse_time, "25ms", 0.025),
        (parse_time, "50us", 50e-6),
        (parse_time, "50µs", 50e-6),
        (parse_time, "0.3s", 0.3),
        (parse_time, "25", None),
        (parse_time, 25, None),
        (parse_time, "25 min", None),
        (parse_share, "0.1%", 0.001),
        (parse_share, 0.25, 0.25),
        (parse_share, "0.25", 0.25),
        (parse_share, "100%", None),
        (parse_share, True, None),
        (parse_share, "a lot", None),
    ],
)
def test_quantities(parse: Callable[[object], float], text: object, value: float | None) -> None:
    if value is None:
        with pytest.raises(ValueError, match="must be a"):
            parse(text)
    else:
        assert parse(text) == pytest.approx(value)


def test_rates_as_printed() -> None:
    printed = [format_rate(rate) for rate in (100e6, 2.5e9, 999.9e6, 64e3, 8, math.inf)]
    assert printed == ["100 Mbit/s", "2.5 Gbit/s", "999.9 Mbit/s", "64 kbit/s", "8 bit/s", "unlimited"]


def test_addresses_go_both_ways() -> None:
    for number in (0, 1, 63, 300):
        assert host_number(bytes(int(part) for part in host_address(number).split("."))) == number


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_network(name: str) -> None:
    network = make_network(preset=name)
    assert presets()[name]["about"]
    assert all(0 < network.rate(*pair) < math.inf for pair in network.routes)
    assert network.load() > 0


def test_presets_are_those_promised() -> None:
    assert set(presets()) == {
        *("rack", "datacentre", "10GbE", "1GbE", "100Mbit", "wifi", "half-globe", "world", "raspberry-pi")
    }
    delays = {name: make_network(preset=name).routes[0, 1].delay_s for name in ("datacentre", "half-globe", "world")}
    assert delays == {"datacentre": 0.001, "half-globe": 0.150, "world": 0.300}
    pi = make_network(preset="raspberry-pi", flags={"hosts": 16})
    assert len(pi.hosts) == 16 and all(host.compute == 0.1 for host in pi.hosts)


def test_flags_win_over_the_file_and_the_file_over_its_preset(tmp_path: Path) -> None:
    file = tmp_path / "net.toml"
    file.write_text('preset = "world"\nhosts = 3\nbandwidth = "10Mbit"\n')
    network = make_network(topology=file, flags={"bandwidth": "20Mbit", "ranks": 2})
    assert len(network.hosts) == 3 and network.num_ranks == 6
    assert network.rate(0, 2) == 20e6 and network.routes[0, 2].delay_s == 0.3
    assert make_network() == make_network(preset="1GbE")


TWO_SITES = """
hosts = 4
ranks = 2
bandwidth = "1Gbit"
delay = "1ms"
[[host]]
number = 3
ranks = 1
upload = "10Mbit"
compute = 0.5
[[link]]
from = [0, 1]
to = [2, 3]
bandwidth = "100Mbit"
delay = "50ms"
loss = "1%"
"""


def test_hosts_and_links_that_differ(tmp_path: Path) -> None:
    file = tmp_path / "net.toml"
    file.write_text(TWO_SITES)
    network = make_network(topology=file)
    assert [host.ranks for host in network.hosts] == [2, 2, 2, 1]
    assert (network.hosts[3].upload_bits_per_s, network.hosts[3].download_bits_per_s) == (10e6, 1e9)
    assert network.hosts[3].compute == 0.5
    assert (network.rate(0, 1), network.rate(0, 2), network.rate(3, 0)) == (1e9, 100e6, 10e6)
    assert network.routes[0, 1].delay_s == 0.001 and network.routes[0, 1].trunk is None
    there, back = network.routes[0, 2], network.routes[2, 0]
    assert there.delay_s == back.delay_s == 0.050 and there.loss == 0.01
    assert there.trunk == network.routes[1, 3].trunk != back.trunk  # one line each way, shared by the pairs
    assert network.trunks == (100e6, 100e6)
    assert network.round_trip_s() == pytest.approx(0.1)


def test_air_is_one_line_for_everybody() -> None:
    network = make_network(preset="wifi", flags={"hosts": 4})
    assert len(network.trunks) == 1 and {route.trunk for route in network.routes.values()} == {0}
    assert network.load() == network.trunks[0]


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    file = tmp_path / "net.toml"
    file.write_text(
        'preset = "wify"\nhosts = 99\nbandwith = "1Gbit"\ndelay = 5\nloss = "2"\n'
        '[[host]]\nnumber = -1\nranks = 0\n[[link]]\nfrom = "some"\nto = [1]\none_way = 1\n'
    )
    with pytest.raises(LaunchError) as caught:
        make_network(topology=file)
    told = str(caught.value)
    for words in (
        'preset "wify" is not known; did you mean "wifi"?',
        "hosts = 99 must be a whole number from 1 to 64",
        'bandwith is not known; did you mean "bandwidth"?',
        "delay = 5 must be a time",
        'loss = "2" must be a share',
        "[[host]] 0: number = -1",
        "[[host]] 0: ranks = 0",
        '[[link]] 0: from = "some" must be "all" or a list',
        "[[link]] 0: one_way = 1 must be true or false",
    ):
        assert told.count(words) == 1, words
    assert len(caught.value.problems) == 9 and all(str(file) in problem for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[host]]\nnumber = 2\n", "number = 2; the 2 hosts are numbered 0 to 1"),
        ("[[host]]\nranks = 2\n", "no number; the 2 hosts are numbered 0 to 1"),
        ("[[link]]\nto = [1]\n", "from = missing"),
        ("[[link]]\nfrom = [0]\nto = [7]\n", "to = [7]; the 2 hosts are numbered 0 to 1"),
        ('delay = "1ms"\njitter = "2ms"\n', "jitter 2 ms is more than the delay of 1 ms"),
        ("host = 3\n", "host must be a table"),
        ("hosts = \n", "is not valid TOML"),
    ],
)
def test_what_does_not_fit_together(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "net.toml"
    file.write_text(text)
    with pytest.raises(LaunchError, match="net.toml") as caught:
        make_network(topology=file)
    assert told in str(caught.value)


def test_a_preset_goes_into_the_file(tmp_path: Path) -> None:
    file = tmp_path / "net.toml"
    file.write_text("hosts = 3\n")
    with pytest.raises(LaunchError, match='write preset = "wifi" in'):
        make_network(preset="wifi", topology=file)


def test_what_the_machine_cannot_hold() -> None:
    network = make_network(flags={"hosts": 4, "bandwidth": "10Gbit", "delay": "50us"})
    problems = problems_of_machine(network, num_cores=2, bits_per_s=8e9, latency_s=100e-6)
    assert len(problems) == 2
    assert "40 Gbit/s; the switch moves 8 Gbit/s" in problems[0] and "at most 2 Gbit/s per host" in problems[0]
    assert "a delay of 50 µs is less than the 100 µs" in problems[1]
    slow = make_network(preset="raspberry-pi", flags={"hosts": 20})
    (problem,) = problems_of_machine(slow, num_cores=2, bits_per_s=8e9, latency_s=1e-4)
    assert "20 hosts with 2 cores in all" in problem and "lower compute to 0.09" in problem
    assert problems_of_machine(make_network(), num_cores=2, bits_per_s=8e9, latency_s=1e-4) == []

"""Rendezvous ports of tests: two tests that run at the same time never get the same port."""

import socket

import pytest

from conformance.harness import ports


@pytest.fixture
def two(monkeypatch):
    """Only two ports exist, and none is in use."""
    monkeypatch.setattr(ports, "PORTS", (20001, 20002))
    monkeypatch.setattr(ports, "HELD", held := ports.deque(maxlen=2))
    yield
    for name in held:
        name.close()


def test_no_port_is_given_twice(two):
    assert {ports.free_port(), ports.free_port()} == {20001, 20002}


def test_a_port_where_somebody_listens_is_not_given(two):
    with socket.create_server(("", 20001)):
        assert ports.free_port() == 20002


def test_what_another_process_was_given_is_not_given(two):
    with socket.socket(socket.AF_UNIX) as name:
        name.bind("\0ddp-sites-port-20002")
        assert ports.free_port() == 20001


def test_ports_are_none_of_outgoing_connections():
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        lowest = int(file.read().split()[0])
    assert min(ports.PORTS) > 1023 and max(ports.PORTS) < lowest

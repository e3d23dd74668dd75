"""Rank accepts good values. Impossible values are errors that name the variable and its value.

python -m pytest core/tests/test_rank.py
"""

import dataclasses

import pytest
from ddp_core import Rank
from ddp_core.errors import ExitCode, PreflightError

# The second of two ranks on the second of two nodes, in a made-up launcher's variables.
GOOD = {
    "L_RANK": "3",
    "L_SIZE": "4",
    "L_LOCAL_RANK": "1",
    "L_LOCAL_SIZE": "2",
    "L_NODE": "1",
    "L_ADDR": "node0",
    "L_PORT": "29500",
    "L_JOB": "77.0",
}
VARIABLES = dict(
    rank="L_RANK",
    world_size="L_SIZE",
    local_rank="L_LOCAL_RANK",
    local_world_size="L_LOCAL_SIZE",
    node_rank="L_NODE",
    master_addr="L_ADDR",
    master_port="L_PORT",
    job_id="L_JOB",
)
ONE_NODE = GOOD | {"L_LOCAL_SIZE": "4", "L_LOCAL_RANK": "3", "L_NODE": "0"}
NUMBERS = [variable for name, variable in VARIABLES.items() if name not in ("master_addr", "job_id")]


def read(environ: dict[str, str]) -> Rank:
    return Rank.read(environ, **VARIABLES)


def test_good_values_become_a_rank():
    assert read(GOOD) == Rank(3, 4, 1, 2, 1, "node0", 29500, "77.0")


def test_spaces_around_a_value_do_not_count():
    assert read(GOOD | {"L_RANK": " 3 ", "L_ADDR": "node0\n"}) == read(GOOD)


def test_a_world_of_one_needs_no_launcher():
    rank = Rank.single()
    assert (rank.rank, rank.world_size, rank.local_rank, rank.local_world_size, rank.node_rank) == (0, 1, 0, 1, 0)


def test_a_rank_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Rank.single().rank = 1


def test_a_launcher_store_is_noted():
    assert Rank.read(GOOD, launcher_store=True, **VARIABLES).launcher_store
    assert not read(GOOD).launcher_store


@pytest.mark.parametrize("variable", GOOD)
@pytest.mark.parametrize("missing", [None, "", "  "])
def test_a_missing_value_names_its_variable(variable, missing):
    environ = {name: value for name, value in GOOD.items() if name != variable}
    if missing is not None:
        environ[variable] = missing
    with pytest.raises(PreflightError, match=f"{variable} is not set"):
        read(environ)


@pytest.mark.parametrize("variable", NUMBERS)
@pytest.mark.parametrize("value", ["abc", "-1", "1.0", "0x1", "1 2", "1_0", "+1", "²", "٣", "$SLURM_PROCID", "2(x3)"])
@pytest.mark.fault(9)
def test_what_is_no_whole_number_names_variable_and_value(variable, value):
    with pytest.raises(PreflightError) as caught:
        read(GOOD | {variable: value})
    assert str(caught.value).startswith(f"{variable}={value!r}, but should be")


@pytest.mark.fault(9)
@pytest.mark.parametrize("variable", NUMBERS)
@pytest.mark.parametrize("value", ["9" * 5000, "1" * 19])
def test_a_number_of_many_digits_is_refused_and_cut(variable, value):
    with pytest.raises(PreflightError, match=f"^{variable}='[19]{{19,80}}', but should be") as caught:
        read(GOOD | {variable: value})
    assert len(str(caught.value)) < 200


@pytest.mark.fault(9)
@pytest.mark.parametrize(
    "variable, value",
    [
        ("L_SIZE", "99999999"),  # the error must not list the missing ranks of such a world
        ("L_ADDR", "n" * 64),
        ("L_ADDR", "n..m"),
        ("L_ADDR", "n." * 130),
        ("L_ADDR", "\x1b[2Jnode"),
        ("L_ADDR", "n\u00f6de"),
        ("L_JOB", "7\x1b[2J"),
        ("L_JOB", "7" * 5000),
    ],
)
def test_a_value_that_no_machine_has_is_one_short_line(variable, value):
    with pytest.raises(PreflightError, match=f"^{variable}=.*, but should be") as caught:
        read(GOOD | {variable: value})
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


@pytest.mark.parametrize("address", ["fe80::1%hsn0", "10.0.0.1", "x1000c0s0b0n0.hsn.cm.example.org", "node_1", "nid001001."])
def test_addresses_of_every_kind_are_good(address):
    assert read(GOOD | {"L_ADDR": address}).master_addr == address


@pytest.mark.parametrize(
    "environ, named",
    [
        (GOOD | {"L_SIZE": "0"}, "L_SIZE=0"),
        (GOOD | {"L_RANK": "4"}, "L_RANK=4"),
        (GOOD | {"L_RANK": "4"}, "L_SIZE=4"),
        (GOOD | {"L_LOCAL_SIZE": "0"}, "L_LOCAL_SIZE=0"),
        (GOOD | {"L_LOCAL_SIZE": "5"}, "L_LOCAL_SIZE=5"),
        (GOOD | {"L_LOCAL_RANK": "2"}, "L_LOCAL_RANK=2"),
        (GOOD | {"L_RANK": "0"}, "L_LOCAL_RANK=1"),  # the local rank is above the rank
        (GOOD | {"L_NODE": "4"}, "L_NODE=4"),
        (ONE_NODE | {"L_NODE": "1"}, "L_NODE=1"),  # all ranks are on one node, which must be the first
        (ONE_NODE | {"L_LOCAL_RANK": "2"}, "L_LOCAL_RANK=2"),  # all ranks are on one node, so local rank and rank must agree
        (GOOD | {"L_PORT": "65536"}, "L_PORT=65536"),
        (GOOD | {"L_PORT": "99999"}, "L_PORT=99999"),
        (GOOD | {"L_PORT": "0"}, "L_PORT=0"),  # a port that other ranks cannot know
        (GOOD | {"L_ADDR": "127.0.0.1"}, "L_ADDR='127.0.0.1'"),  # the other node would connect to itself
        (GOOD | {"L_ADDR": "127.0.1.1"}, "L_ADDR='127.0.1.1'"),  # `hostname -i` gives this with Debian's /etc/hosts
        (GOOD | {"L_ADDR": "::1"}, "L_ADDR='::1'"),
        (GOOD | {"L_ADDR": "localhost"}, "L_ADDR='localhost'"),
    ],
)
@pytest.mark.fault(3)
def test_values_that_cannot_be_true_together_name_variable_and_value(environ, named):
    with pytest.raises(PreflightError) as caught:
        read(environ)
    assert named in str(caught.value)
    assert "but should be" in str(caught.value)
    assert caught.value.code == ExitCode.PREFLIGHT == 3
    assert isinstance(caught.value, ValueError)


def test_an_error_names_the_field_where_no_variable_is_known():
    with pytest.raises(PreflightError, match="rank=2"):
        Rank(2, 2, 0, 1, 1, "node0", 29500, "77")


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_loopback_is_good_on_one_node(address):
    assert read(ONE_NODE | {"L_ADDR": address}).master_addr == address


def test_port_0_is_good_for_a_world_of_one():
    alone = ONE_NODE | {"L_SIZE": "1", "L_LOCAL_SIZE": "1", "L_RANK": "0", "L_LOCAL_RANK": "0", "L_PORT": "0"}
    assert read(alone).master_port == 0


def test_uneven_nodes_are_good():
    """Two nodes of 3 and 1 ranks: the last rank is alone on its node."""
    assert read(GOOD | {"L_LOCAL_SIZE": "1", "L_LOCAL_RANK": "0"}).rank == 3
    assert read(GOOD | {"L_RANK": "2", "L_LOCAL_SIZE": "3", "L_LOCAL_RANK": "2", "L_NODE": "0"}).rank == 2


@pytest.mark.fault(3)
def test_two_addresses_in_one_value_are_an_error():
    """`hostname -i` prints several addresses on a node with several interfaces."""
    with pytest.raises(PreflightError, match=r"L_ADDR='10\.0\.0\.1 10\.1\.0\.1'"):
        read(GOOD | {"L_ADDR": "10.0.0.1 10.1.0.1"})


# ---- number of earlier starts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value, restart", [(None, 0), ("", 0), (" ", 0), ("0", 0), ("3", 3)])
def test_the_number_of_earlier_starts_may_be_unset(value, restart):
    """Slurm sets SLURM_RESTART_COUNT only from the second start on."""
    environ = GOOD if value is None else GOOD | {"L_RESTARTS": value}
    assert Rank.read(environ, **VARIABLES, restart="L_RESTARTS").restart == restart
    assert read(GOOD | {"L_RESTARTS": "3"}).restart == 0, "a site that names no variable has none"


@pytest.mark.parametrize("value", ["-1", "one", "1.0"])
def test_a_number_of_starts_that_is_none_is_named(value):
    with pytest.raises(PreflightError, match=f"L_RESTARTS='{value}', but should be"):
        Rank.read(GOOD | {"L_RESTARTS": value}, **VARIABLES, restart="L_RESTARTS")


def test_a_negative_number_of_starts_is_refused_where_no_variable_is_known():
    with pytest.raises(PreflightError, match="restart=-1"):
        Rank(0, 1, 0, 1, 0, "node0", 0, "77", restart=-1)

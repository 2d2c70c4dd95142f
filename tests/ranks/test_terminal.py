"""On a terminal: one line while ranks join, and color; in a log neither."""

import subprocess
import sys
from collections.abc import Mapping

import pytest
from terminals import Terminal, terminal

WRAPPER = [sys.executable, "-m", "distboot", "run"]
RED = "\x1b[1;31m"
CLEARED = "\r\x1b[K"
Env = Mapping[str, str]


def _node(number: int, port: int) -> list[str]:
    where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    ranks = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"]
    return [*WRAPPER, *ranks, *where, "--join-timeout", "60", "--", "echo", "trained"]


_CTRL_S = b"\x13"


def _lines(seen: Terminal) -> list[str]:
    """What stays on the terminal, line by line."""
    lines = seen.text.replace("\r\n", "\n").split("\n")
    return [line.rpartition(CLEARED)[2] for line in lines]


def test_missing_ranks_are_one_line_in_place(clean_env: Env, port: int) -> None:
    with terminal(_node(0, port), clean_env) as seen:
        seen.wait_for("distboot: 1/2 nodes joined (")
        seen.wait_for(" s left); missing: node 1")
        assert "\n" not in seen.text
        other = subprocess.run(_node(1, port), env=clean_env, timeout=60, check=False)
        assert other.returncode == 0
        assert seen.finish() == 0
    assert not [line for line in _lines(seen) if "missing" in line]
    assert "trained" in _lines(seen)


@pytest.mark.parametrize(("columns", "length"), [(40, 39), (0, 79)])
def test_line_in_place_is_cut_to_the_window(
    clean_env: Env, port: int, columns: int, length: int
) -> None:
    with terminal(_node(0, port), clean_env, columns=columns) as seen:
        seen.wait_for("distboot: 1/2 nodes joined (")
        seen.wait_for(f"\r{CLEARED}")
        shown = seen.text.split(CLEARED)[1].rstrip("\r")
    assert len(shown) == length


def test_stopped_output_does_not_stop_the_roll_call(clean_env: Env, port: int) -> None:
    with terminal([*_node(0, port)[:-2], "true"], clean_env) as seen:
        seen.wait_for("distboot: 1/2 nodes joined (")
        seen.type(_CTRL_S)
        other = subprocess.run(_node(1, port), env=clean_env, timeout=60, check=False)
        assert other.returncode == 0
        assert seen.process.wait(40) == 0


@pytest.mark.parametrize(
    ("more", "term"), [({"DISTBOOT_LOG_FORMAT": "json"}, "xterm"), ({}, "dumb")]
)
def test_other_terminals_have_plain_lines(more: Env, term: str, clean_env: Env, port: int) -> None:
    with terminal(_node(0, port), {**clean_env, **more, "TERM": term}) as seen:
        seen.wait_for("1/2 nodes joined; missing: node 1")
        seen.wait_for("\n")
    assert "\x1b" not in seen.text


@pytest.mark.parametrize(
    ("more", "has_color"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_errors_are_red_on_a_terminal(more: Env, has_color: bool, clean_env: Env) -> None:
    with terminal([*WRAPPER, "nosuch.py"], {**clean_env, **more}) as seen:
        assert seen.finish() != 0
    assert "distboot: error[" in seen.text
    assert seen.text.startswith(RED) == has_color


def test_failure_is_red_and_logs_are_plain(clean_env: Env, port: int) -> None:
    command = [*WRAPPER, "--nproc-per-node", "2", "--", "sh", "-c", "exit 3"]
    environ = {**clean_env, "MASTER_PORT": str(port)}
    with terminal(command, environ) as seen:
        assert seen.finish() == 3
    assert f": {RED}rank " in seen.text
    done = subprocess.run(command, env=environ, capture_output=True, timeout=60, check=False)
    assert b"failed first" in done.stderr
    assert b"\x1b" not in done.stderr

"""Coverage-guided fuzzing of the readers that take text from the environment: hostlists, counts, addresses, TF_CONFIG.

    pip install atheris              # Python 3.11 to 3.13, Linux
    python bench/fuzz.py [-max_total_time=600] [any other option of libFuzzer] [a folder that keeps the inputs]

A reader may return a value or raise the one error that it documents. Any other exception is a crash, and so is a value
that breaks its promise, an input of at most 4 kB that takes 5 seconds, or more than 1 GB of memory.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["distboot", "json"]):
    import json  # noqa: F401 - TF_CONFIG's reader imports it when it is called

    from distboot.base.errors import DistbootError
    from distboot.detection.launchers.tf_config import TF_CONFIG
    from distboot.detection.parse import (
        expand_counts,
        expand_hosts,
        is_loopback,
        json_hosts,
        parse_address,
        parse_port,
    )
    from distboot.detection.readings import read_placement


def _hosts(text: str) -> None:
    hosts = expand_hosts(text)
    assert hosts
    some = hosts[:1000]
    assert expand_hosts(",".join(some)) == some, "host names are hostlists of themselves"


def _counts(text: str) -> None:
    assert all(count >= 0 for count in expand_counts(text))


def _address(text: str) -> None:
    host, port = parse_address(text)
    assert port is None or parse_port(str(port)) == port
    is_loopback(host)
    assert parse_address(f"[{host}]" if ":" in host else host) == (host, None), (
        "a host is an address of itself"
    )


def _json(text: str) -> None:
    assert json_hosts(text)


def _tf_config(text: str) -> None:
    with suppress(DistbootError):
        placement = read_placement(TF_CONFIG, {"TF_CONFIG": text})
        assert placement is not None
        assert 0 <= placement.rank < placement.world_size


READERS = (_hosts, _counts, _address, _json, _tf_config)
TASK = '{"cluster": {"chief": ["a:1"], "worker": ["b:1", "[::1]:2"], "ps": []}, "task": {"type": "worker", "index": 0}}'
EXAMPLES = ("rack[1-2]n[03-04,7],x", "4(x2),3", "[fe80::1%eth0]:29500", '["algo-1","algo-2"]', TASK)


def one_input(data: bytes) -> None:
    """The first byte chooses the reader, the rest is its text."""
    if data:
        with suppress(ValueError):
            READERS[data[0] % len(READERS)](data[1:].decode("utf-8", "surrogateescape"))


def main() -> None:
    """Fuzz until libFuzzer's time is over."""
    options = [
        "-max_total_time=600",
        "-timeout=5",
        "-rss_limit_mb=1024",
        "-max_len=4096",
        "-print_final_stats=1",
    ]
    folders = [word for word in sys.argv[1:] if not word.startswith("-")]
    if folders:
        Path(folders[0]).mkdir(parents=True, exist_ok=True)
        for number, example in enumerate(EXAMPLES):
            (Path(folders[0]) / f"example{number}").write_bytes(bytes([number]) + example.encode())
    atheris.Setup([sys.argv[0], *options, *sys.argv[1:]], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

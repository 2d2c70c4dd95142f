"""The readers of addresses, ports and Slurm's lists."""

import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest

from distboot.detection.parse import (
    expand_counts,
    expand_hosts,
    parse_address,
    parse_port,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.4", ("10.0.0.4", None)),
        ("10.0.0.4:6000", ("10.0.0.4", 6000)),
        ("nodea", ("nodea", None)),
        ("node-a.cluster_1.test:1", ("node-a.cluster_1.test", 1)),
        ("worker-0.svc.", ("worker-0.svc.", None)),
        ("fd00::4", ("fd00::4", None)),
        ("[fd00::4]", ("fd00::4", None)),
        ("[fd00::4]:65535", ("fd00::4", 65535)),
        ("::1", ("::1", None)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        ("fe80::1%2", ("fe80::1%2", None)),
    ],
)
def test_addresses(text: str, address: tuple[str, int | None]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":1",
        "a:",
        "a:b",
        "[::1",
        "[::1]x",
        "[::1]:",
        "[a]:1",
        "1.2.3",
        "1.2.3.4.5",
        "256.1.1.1",
        "010.0.0.1",
        "1234",
        "a b",
        "a/b",
        "-a",
        "tcp://a:1",
        "g::1",
        "a" * 254,
        "a\n",
        "a\x00",
        "é",
        "1.2.3.٤",
        "a..b",
        "a" * 64,
        "fe80::1%",
        "fe80::1%e\nexport X=1",
        "fe80::1%a,rank=0",
        "fe80::1%a b",
        "h:029500",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^(is|has) "):
        parse_address(text)


@pytest.mark.parametrize("text", ["user:secret@node", "user:secret@node:29500", "u@[::1]:1"])
def test_user_name_is_what_is_wrong(text: str) -> None:
    with pytest.raises(ValueError, match=r"^has a user name"):
        parse_address(text)


def test_ports() -> None:
    assert [parse_port(text) for text in ("1", "29500", "65535")] == [1, 29500, 65535]
    for text in ("0", "65536", "", "1e3", "-1", "+1", " 1", "01", "1_0", "٣", "9" * 1000):
        with pytest.raises(ValueError, match=r"^is "):
            parse_port(text)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("nodea", ["nodea"]),
        ("nodea,nodeb", ["nodea", "nodeb"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[009-011,020]", ["gpu009", "gpu010", "gpu011", "gpu020"]),
        ("rack[1-2]n[3-4,7]", ["rack1n3", "rack1n4", "rack1n7", "rack2n3", "rack2n4", "rack2n7"]),
        ("a-ib[1-2],b.x,b.x", ["a-ib1", "a-ib2", "b.x", "b.x"]),
        ("n[1-2][3-4]", ["n13", "n14", "n23", "n24"]),
        (
            "a[1-2]b[3-4]c[5,6]",
            ["a1b3c5", "a1b3c6", "a2b3c5", "a2b3c6", "a1b4c5", "a1b4c6", "a2b4c5", "a2b4c6"],
        ),
        ("[1-2],n[007]", ["1", "2", "n007"]),
        ("n[1-010]", ["n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9", "n10"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
    ],
)
def test_hostlists(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a,",
        "a,,b",
        "n[",
        "n[]",
        "n]",
        "n[1",
        "n[1-]",
        "n[-1]",
        "n[3-1]",
        "n[a]",
        "n[[1]]",
        "n[1,]",
        "a b",
        "n[1-9999999999]",
        "n[1-999][1-9999]",
        "n[1-65537]",
        "n[1-3]x",
        "a[1-2],b[3-4]c",
        "-a",
        "-[1]",
        "n[1]]",
        "]n[1]",
        "n[0x1]",
        "n[1-2-3]",
        "n\n",
        "n[1]" * 10_000 + "x",
        "n" + "[1-65536]" * 10_000,
        "n[" + "1," * 100_000,
        "a" * 100_000 + "!",
    ],
)
def test_what_is_no_hostlist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^(is not a hostlist|names more)"):
        expand_hosts(text)


_SCONTROL = shutil.which("scontrol")


@pytest.mark.skipif(_SCONTROL is None, reason="no scontrol (Debian: slurm-client)")
def test_hostlists_are_read_as_slurm_reads_them(tmp_path: Path) -> None:
    """Whatever is accepted is what scontrol makes of it, and what scontrol rejects is rejected."""
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "ClusterName=x\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=p "
        "Nodes=localhost\n"
    )
    random = Random(3)
    pieces = [
        "n",
        "rack",
        "-",
        ",",
        "[",
        "]",
        "1",
        "07",
        "10",
        "-3",
        "[1-3]",
        "[08-11]",
        "[1,3]",
        "n[2-4]",
        "x.y",
        "_",
    ]
    accepted = 0
    for _ in range(300):
        text = "".join(random.choices(pieces, k=random.randint(1, 6)))
        try:
            ours: list[str] | None = expand_hosts(text)
        except ValueError:
            ours = None
        said = subprocess.run(
            [str(_SCONTROL), "show", "hostnames", text],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            env={"SLURM_CONF": str(conf)},
        )
        theirs = None if "nvalid hostlist" in said.stderr + said.stdout else said.stdout.split()
        if ours is not None:
            accepted += 1
            assert ours == theirs, text
        if theirs is None:
            assert ours is None, text
    assert accepted > 50


def test_counts() -> None:
    assert expand_counts("4(x2),3") == [4, 4, 3]
    for text in ("", "4(x)", "4x2", "a", "4,", "-1", "4(x99999999)"):
        with pytest.raises(ValueError, match=r"^(is not a list|names more)"):
            expand_counts(text)


def test_hundred_thousand_hosts() -> None:
    hosts = expand_hosts("n[000001-050000,050001-100000]")
    assert (len(hosts), hosts[0], hosts[-1]) == (100_000, "n000001", "n100000")

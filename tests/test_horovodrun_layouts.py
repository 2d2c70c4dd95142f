"""horovodrun's numbers on every small layout, hosts named twice too: true or unknown, and not unknown without need."""

from __future__ import annotations

import itertools
from collections import defaultdict

from distboot import detect

Layout = tuple[tuple[str, int], ...]


def _environs(layout: Layout) -> list[tuple[str, dict[str, str]]]:
    """Host and environment of each rank, as horovod/runner/common/util/hosts.py (0.28.1) assigns them for -H."""
    ranks: list[tuple[str, int, int]] = []
    cross: dict[int, dict[str, int]] = defaultdict(dict)
    for host, slots in layout:
        for local_rank in range(slots):
            cross[local_rank][host] = len(cross[local_rank])
            ranks.append((host, local_rank, slots))
    environs = []
    for rank, (host, local_rank, slots) in enumerate(ranks):
        numbers = {"RANK": rank, "SIZE": len(ranks), "LOCAL_RANK": local_rank, "LOCAL_SIZE": slots}
        numbers |= {"CROSS_RANK": cross[local_rank][host], "CROSS_SIZE": len(cross[local_rank])}
        environ = {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}
        server = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.77.0.10", "HOROVOD_GLOO_RENDEZVOUS_PORT": "35055"}
        environs.append((host, environ | server))
    return environs


def test_every_layout_of_up_to_four_mentions_of_three_hosts() -> None:
    layouts: list[Layout] = []
    for mentions in range(1, 5):
        for names in itertools.product("abc", repeat=mentions):
            layouts += [
                tuple(zip(names, slots, strict=True)) for slots in itertools.product((1, 2, 3), repeat=mentions)
            ]
    known = 0
    for layout in layouts:
        environs = _environs(layout)
        hosts = [host for host, _ in environs]
        nodes = list(dict.fromkeys(hosts))
        for rank, (host, environ) in enumerate(environs):
            here = [other for other, its_host in enumerate(hosts) if its_host == host]
            p = detect(environ)
            truth = (here.index(rank), len(here), nodes.index(host), len(nodes))
            stated = (p.local_rank, p.local_world_size, p.node_rank, p.num_nodes)
            assert (p.rank, p.world_size) == (rank, len(hosts))
            assert all(number in (None, true) for number, true in zip(stated, truth, strict=True)), (layout, rank)
            known += p.local_rank is not None
    assert known > 5_000


def test_equal_nodes_of_one_two_processes_and_a_single_node_are_known_completely() -> None:
    for layout in ((("a", 1), ("b", 1), ("c", 1)), (("a", 2), ("b", 2)), (("a", 4),)):
        for _, environ in _environs(layout):
            p = detect(environ)
            assert None not in (p.local_rank, p.local_world_size, p.node_rank, p.num_nodes)

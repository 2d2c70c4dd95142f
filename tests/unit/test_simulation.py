"""The ranks of the benches at 10,000 ranks are sockets: the real rank 0 takes them for ranks."""

import sys
from pathlib import Path

from inside import replace
from rendezvous_peers import Rank0, answers, peer

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from inside import Frames, Go, Members, Ready, decode
from simulate_messages import HELLO, lines_of, membership_of_nodes
from simulate_messages import record as rank_of


def test_measured_ranks_are_accepted_by_real_rank_0() -> None:
    first = Rank0(rank_of(0, 20), ready=Ready())
    lines = [(line, peer(first.port, HELLO)) for line in lines_of(20)]
    for line, connection in lines:
        assert b"challenge" in connection.recv(1000)
        connection.sendall(line.record)
    for line, connection in lines:
        (answer,) = Frames(1 << 20).feed(connection.recv(65536))
        assert (
            decode(answer.body, Members)
            == replace(membership_of_nodes(20), master_addr="127.0.0.1").as_message()
        )
        connection.sendall(line.ready())
    first.met()
    first.close()
    assert [answers(connection)[0] for _, connection in lines] == [Go()] * 19

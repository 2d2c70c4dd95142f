"""Ranks of TensorFlow started side by side, by hand or with a `TF_CONFIG` each."""

import json
from collections.abc import Callable
from typing import Any

from inside import free_port
from launched import needs
from supervised import Started, until

needs_tensorflow = needs("tensorflow")

LIMIT = 180  # seconds for a job, on a machine that has other work, too
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}  # errors only


class Ranks(Started):
    """Ranks of TensorFlow."""

    limit = LIMIT

    def wait_for(self, name: str) -> None:
        path = self.folder / name
        until(
            lambda: path.exists() or any(process.poll() is not None for process in self.processes),
            LIMIT,
        )
        assert path.exists(), "\n".join(self.output(rank) for rank in range(len(self.processes)))

    def lines(self) -> list[dict[str, Any]]:
        codes = self.codes()
        outputs = [self.output(rank) for rank in range(len(codes))]
        assert codes == [0] * len(codes), "\n".join(outputs)
        found = [
            json.loads(line)
            for text in outputs
            for line in text.splitlines()
            if line.startswith("{")
        ]
        return sorted(found, key=lambda line: int(line["rank"]))


# Starts a script in several ranks, with `RANK` and its like or with what `each` of them is to have.
ByHand = Callable[..., Ranks]


def by_rank(ranks: int) -> list[dict[str, str]]:
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        for rank in range(ranks)
    ]


def tasks(**cluster: int) -> list[dict[str, str]]:
    """A TF_CONFIG for each task of a cluster on this host: the number of tasks by type."""
    ports: set[int] = set()
    while len(ports) < sum(cluster.values()):
        ports.add(free_port())
    free = iter(ports)
    addresses = {
        kind: [f"127.0.0.1:{next(free)}" for _ in range(count)] for kind, count in cluster.items()
    }
    tasks = [
        {"type": kind, "index": index} for kind, count in cluster.items() for index in range(count)
    ]
    return [{"TF_CONFIG": json.dumps({"cluster": addresses, "task": task})} for task in tasks]

"""What a container passes: subsets of the variables of every capture; and random mixtures of all launcher families.

Of a subset all ranks of a run have the same. It is placed as it really was, as far as it says anything; or some rank
refuses it; or the ranks do when they meet. Whether a variable was passed is decided when it is asked for, so that
subsets that read the same are tried once: some hundred of them where there are 2 to the 40th. Every run of the
tests tries 8 of each capture, and DISTBOOT_ALL_SUBSETS=1 all, in some ten minutes; with -s it says how many, and what
became of them.
"""

import itertools
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping

import documented
import pytest
from captured import ALL, Capture, one, refused, shared_local_ranks, wrong_numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import LAUNCHERS, JoinTable, WorkerInfo, build_membership, signs

from distboot import DistbootError, Placement, detect

# Rank and size, of which a container has to get both; Slurm has two variables with the size.
_ENOUGH = {name: [tuple(map(str, one.numbers[:2]))] for name, one in LAUNCHERS.items()}
_ENOUGH["slurm"].append(("SLURM_PROCID", "SLURM_NTASKS"))
_ENOUGH["torch"] = [("RANK", "WORLD_SIZE")]  # its record reads them by itself

# Where a rank may have a wrong number, as nothing is left that shows it, and the ranks refuse each other at the latest.
_SHOWN_BY_THE_OTHERS = {
    # LOCAL_RANK is 0 on all of them, as on ranks that are alone on their nodes.
    "torchrun-2.13.0/virtual_local_rank": {"local_rank"},
    # Each task of srun has started two processes: as many as there are tasks, as if RANK had been exported for those.
    "slurm-salloc+torchrun-22.05.8/torchrun_standalone_in_srun_n2": {"rank", "local_rank"},
}


def _outcome(capture: Capture, passed: dict[str, bool]) -> str:
    """What becomes of a job whose processes got these variables: that it is placed, or who refuses it, and how."""
    placements: list[Placement] = []
    refusals: list[str] = []
    shown = next(
        (its for name, its in _SHOWN_BY_THE_OTHERS.items() if capture.name.startswith(name)), set()
    )
    wrong: set[str] = set()
    for process in capture.processes:
        environ = _Undecided(process.environ, passed)
        try:
            placement = detect(environ)
        except DistbootError as error:
            refusals.append(f"refused: {error.code}")
            continue
        if placement.node_level is not None:  # as `init` and the wrapper refuse it
            refusals.append("refused: node-level-launch")
            continue
        if placement.launcher == "single" and _is_batch_script(environ):
            return "taken for the batch script"
        placements.append(placement)
        wrong |= wrong_numbers(placement, process).keys()
    assert wrong <= shown, f"{capture.name}: wrong {wrong}"
    outcome = refusals[0] if refusals else _when_they_meet(capture, placements)
    assert not wrong or refusals or outcome.startswith("refused when the ranks meet"), (
        f"{capture.name}: {wrong}"
    )
    return outcome


def _is_batch_script(environ: Mapping[str, str]) -> bool:
    """Whether it has all that a batch script has, and nothing of a step: as a batch script it has to be believed."""
    step = (
        "SLURM_STEP_ID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NODELIST",
        "SLURM_STEP_TASKS_PER_NODE",
    )
    whole = (
        "ENVIRONMENT",
        "SLURM_JOB_ID",
        "SLURM_JOB_NODELIST",
        "SLURM_NODEID",
        "SLURM_LOCALID",
        "SLURM_TASK_PID",
    )
    return all(name in environ for name in whole) and not any(name in environ for name in step)


def _when_they_meet(capture: Capture, placements: list[Placement]) -> str:
    if capture.processes[0].expected["size"] == 1:
        return "placed"  # each process is a job of its own
    register = JoinTable(placements[0].world_size)
    records = [
        WorkerInfo(
            p.rank,
            p.launcher,
            "host",
            f"node {process.expected['node_rank']}",
            pid,
            str(pid),
            p.world_size,
            p.local_rank,
            p.local_world_size,
            p.node_rank,
            p.num_nodes,
        )
        for pid, (p, process) in enumerate(zip(placements, capture.processes, strict=True))
    ]
    try:
        for record in records:
            register.add(record)
        build_membership(records)
    except DistbootError as error:
        return f"refused when the ranks meet: {error.code}"
    assert shared_local_ranks(placements, capture.processes) == []
    return "placed"


class _Undecided(Mapping[str, str]):
    """An environment in which it is decided when it is asked for whether a variable was passed: at first it was not."""

    def __init__(self, environ: Mapping[str, str], passed: dict[str, bool]) -> None:
        self._environ = environ
        self._passed = passed

    def __getitem__(self, name: str) -> str:
        value = self._environ[name]
        if not self._passed.setdefault(name, False):
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        # All who look at every name look for those that may be a sign of others
        return iter([name for name in signs.names(self._environ) if name in self])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _outcomes(capture: Capture, enough: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """What becomes of every subset, in an order of chance: for how many subsets, which read the same, and what."""
    there = len(set().union(*(process.environ for process in capture.processes)).union(enough))
    left = [dict.fromkeys(enough, True)]
    chance = random.Random(capture.name)
    while left:
        passed = left.pop(chance.randrange(len(left)))
        known = len(passed)
        outcome = _outcome(capture, passed)
        asked = list(passed.items())
        left += [
            {**dict(asked[:at]), name: True} for at, (name, _) in enumerate(asked) if at >= known
        ]
        yield 2 ** (there - len(passed)), outcome


@pytest.mark.parametrize("capture", ALL, ids=lambda capture: capture.name)
def test_rank_and_size_suffice_and_subsets_never_mislead(capture: Capture) -> None:
    for enough in _ENOUGH[capture.launcher]:
        outcomes = [outcome for _, outcome in itertools.islice(_outcomes(capture, enough), 8)]
        if capture.launcher not in ("single", "slurm"):  # where rank 0 alone may be a batch script
            assert outcomes[0] == "placed"


@pytest.mark.skipif(
    "DISTBOOT_ALL_SUBSETS" not in os.environ, reason="ten minutes: DISTBOOT_ALL_SUBSETS=1 -s"
)
def test_no_subset_at_all_gives_a_wrong_number() -> None:
    tried: Counter[tuple[str, str]] = Counter()
    for capture in ALL:
        for enough in _ENOUGH[capture.launcher]:
            outcomes = list(_outcomes(capture, enough))
            there = (
                set().union(*(process.environ for process in capture.processes)).difference(enough)
            )
            assert sum(subsets for subsets, _ in outcomes) == 2 ** len(there)
            tried.update((capture.launcher, outcome) for _, outcome in outcomes)
    for (launcher, outcome), number in sorted(tried.items()):
        print(f"{launcher:<12}{number:>8} {outcome}")


def _kept(environ: Mapping[str, str], names: set[str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name in names}


@pytest.mark.parametrize("capture", ALL, ids=lambda capture: capture.name)
def test_named_launcher_needs_rank_and_size_alone(capture: Capture) -> None:
    for enough in _ENOUGH[capture.launcher] if capture.launcher != "single" else ():
        for process in capture.processes:
            placement = detect(_kept(process.environ, set(enough)), launcher=capture.launcher)
            assert (placement.launcher, placement.rank) == (
                capture.launcher,
                process.expected["rank"],
            )
            assert placement.world_size == process.expected["size"]


# -- rank 0 of a Slurm step, and a batch script

_STEP = "slurm-sbatch-22.05.8/srun_2nodes_2procs"
_BATCH = "slurm-sbatch-22.05.8/batch_step_python_no_ntasks"
_PASSED = {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_NODELIST"}


@pytest.mark.parametrize(
    ("rank", "more"), [(0, {"SLURM_STEP_ID"}), (0, {"SLURM_STEP_NUM_TASKS"}), (3, set())]
)
def test_slurm_tasks_are_proved_by_step_or_rank(rank: int, more: set[str]) -> None:
    placement = detect(_kept(one(_STEP, rank), _PASSED | more))
    assert (placement.launcher, placement.rank, placement.world_size) == ("slurm", rank, 4)
    assert placement.local_rank == rank % 2


@pytest.mark.parametrize("environ", [_kept(one(_STEP, 0), _PASSED), _kept(one(_BATCH, 0), _PASSED)])
def test_possible_task_0_is_refused_with_its_remedy(
    environ: dict[str, str],
) -> None:
    refusal = refused(environ)
    assert refusal.code == "unsupported-launcher"
    for said in (
        "docker run -e SLURM_STEP_ID",
        "apptainer exec --env SLURM_STEP_ID=",
        "DISTBOOT_LAUNCHER=slurm",
    ):
        assert said in refusal.hint
    assert detect(environ, launcher="none").world_size == 1
    # One task is alone either way.
    assert detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).world_size == 1


_BATCH_SCRIPTS = [
    one("slurm-sbatch-22.05.8/batch_step_python_1node", 0),
    one("slurm-sbatch-22.05.8/batch_step_python_no_ntasks", 0),
]
_OF_AN_APPLICATION = {"ENVIRONMENT": "production"}


@pytest.mark.parametrize("batch", _BATCH_SCRIPTS)
@pytest.mark.parametrize("tasks", [{}, {"SLURM_NTASKS": "4"}])
def test_batch_script_with_environment_of_an_application(
    batch: dict[str, str], tasks: dict[str, str]
) -> None:
    placement = detect({**batch, **tasks, **_OF_AN_APPLICATION})
    assert (placement.launcher, placement.world_size) == ("single", 1)


_NOT_A_BATCH_SCRIPT = {
    "no ENVIRONMENT": ({"ENVIRONMENT"}, {}),
    "no job": ({"SLURM_JOB_ID"}, _OF_AN_APPLICATION),
    "no process id": ({"SLURM_TASK_PID"}, _OF_AN_APPLICATION),
    "no folder": ({"SLURM_SUBMIT_DIR"}, _OF_AN_APPLICATION),
    "no name": ({"SLURM_JOB_NAME"}, _OF_AN_APPLICATION),
    "no list of tasks": ({"SLURM_GTIDS"}, _OF_AN_APPLICATION),
    "srun's host": (set(), {"SLURM_SRUN_COMM_HOST": "nodea", **_OF_AN_APPLICATION}),
    "srun's address": (set(), {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.4", **_OF_AN_APPLICATION}),
    "a step's hosts": (set(), {"SLURM_STEP_NODELIST": "nodea", **_OF_AN_APPLICATION}),
    "a step's id": (set(), {"SLURM_STEPID": "0", **_OF_AN_APPLICATION}),
    "several tasks": (set(), {"SLURM_GTIDS": "0,1", **_OF_AN_APPLICATION}),
}


@pytest.mark.parametrize("case", _NOT_A_BATCH_SCRIPT)
def test_what_may_be_a_task_stays_refused(case: str) -> None:
    missing, more = _NOT_A_BATCH_SCRIPT[case]
    for batch in _BATCH_SCRIPTS:
        rest = {name: value for name, value in batch.items() if name not in missing}
        assert refused({**rest, **more}).code == "unsupported-launcher"


_OF_SRUN = {
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_LAUNCHER_PORT",
    "SLURM_STEPID",
    "SLURM_SRUN_COMM_HOST",
    "SLURM_SRUN_COMM_PORT",
    "SLURM_LAUNCH_NODE_IPADDR",
}


def test_first_task_is_never_taken_for_script() -> None:
    """Also if a container has only one of the variables that srun sets."""
    tasks = [
        capture.processes[0]
        for capture in ALL
        if capture.launcher == "slurm" and capture.processes[0].expected["size"] != 1
    ]
    assert len(tasks) > 20
    for task in tasks:
        environ = {**task.environ, **_OF_AN_APPLICATION}
        assert environ.keys() >= _OF_SRUN
        for kept in _OF_SRUN:
            left_out = _OF_SRUN - {kept}
            rest = {name: value for name, value in environ.items() if name not in left_out}
            assert _launcher_or_code(rest) != "single", kept


def _launcher_or_code(environ: dict[str, str]) -> str:
    try:
        return detect(environ).launcher
    except DistbootError as error:
        return error.code


# -- random mixtures

ENVIRONMENTS = [process.environ for capture in ALL for process in capture.processes]
ENVIRONMENTS += [
    value
    for value in vars(documented).values()
    if isinstance(value, dict) and "__name__" not in value
]
ENVIRONMENTS += [
    documented.tf_config("worker", 0),
    documented.tf_config("ps", 0, chief=["a:1"], ps=["b:1"]),
]
NAMES = sorted({name for environ in ENVIRONMENTS for name in environ})
VALUES = sorted(
    {value for environ in ENVIRONMENTS for value in environ.values() if len(value) < 200}
)

TEXTS = st.one_of(
    st.integers(0, len(VALUES) - 1).map(VALUES.__getitem__),
    st.text(max_size=8),
    st.text(alphabet="\udcff\ud800a1²٣,[]:/@%", max_size=8),
    st.integers(-2, 9).map(str),
    st.sampled_from(
        ["auto", "localhost", "127.0.0.1:6000", "[fd00::4]:1", "n[1-2]", "2(x2)", "1:3"]
    ),
)


# By index: Hypothesis would write out all environments in the name of the strategy.
@st.composite
def mixtures(draw: st.DrawFn) -> dict[str, str]:
    """Up to three environments, each whole or a part of it, and up to four variables with other values."""
    mixture: dict[str, str] = {}
    for _ in range(draw(st.integers(0, 3))):
        environ = ENVIRONMENTS[draw(st.integers(0, len(ENVIRONMENTS) - 1))]
        names = sorted(environ)
        if draw(st.booleans()):
            kept = draw(st.lists(st.integers(0, len(names) - 1), max_size=12)) if names else []
            names = [names[index] for index in kept]
        mixture |= {name: environ[name] for name in names}
    for _ in range(draw(st.integers(0, 4))):
        mixture[NAMES[draw(st.integers(0, len(NAMES) - 1))]] = draw(TEXTS)
    return mixture


def _result(environ: dict[str, str], launcher: str | None) -> Placement | tuple[str, str, str]:
    try:
        return detect(environ, launcher=launcher)
    except DistbootError as error:
        return error.code, error.message, error.hint


def _is_valid(p: Placement) -> bool:
    """Every number that is stated is in its range, and together they can be so."""
    here = p.world_size if p.local_world_size is None else p.local_world_size
    nodes = p.world_size if p.num_nodes is None else p.num_nodes
    ranges = (
        0 <= p.rank < p.world_size,
        0 <= (p.local_rank or 0) < here <= p.world_size,
        0 <= (p.node_rank or 0) < nodes <= p.world_size,
        p.master_port is None or 1 <= p.master_port <= 65535,
        p.master_addr is None or (p.master_addr != "" and not set("[]/@ \n") & set(p.master_addr)),
    )
    known = p.local_world_size is not None and p.num_nodes is not None
    return all(ranges) and (not known or p.world_size >= here + nodes - 1)


@settings(max_examples=3000, deadline=None)
@given(mixtures(), st.sampled_from([None, None, None, "none", *LAUNCHERS]))
def test_any_mixture_gives_a_placement_or_error(
    environ: dict[str, str], launcher: str | None
) -> None:
    before = dict(environ)
    first = _result(environ, launcher)
    if isinstance(first, Placement):
        assert _is_valid(first)
        assert launcher in (None, first.launcher, "none")
    else:
        assert all(line.isprintable() for text in first for line in text.split("\n")), (
            "no control characters in logs"
        )
        assert first[1]
    assert _result(environ, launcher) == first, "the same for the same input"
    assert environ == before

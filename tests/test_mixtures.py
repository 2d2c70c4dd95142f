"""Random mixtures of the variables of all launcher families: a valid placement or a named error, always the same."""

from __future__ import annotations

import documented
from captured import ALL
from hypothesis import given, settings
from hypothesis import strategies as st

from distboot import DistbootError, Placement, detect
from distboot.launchers import INNERMOST_FIRST

ENVIRONMENTS = [process.environ for capture in ALL for process in capture.processes]
ENVIRONMENTS += [value for value in vars(documented).values() if isinstance(value, dict) and "__name__" not in value]
ENVIRONMENTS += [documented.tf_config("worker", 0), documented.tf_config("ps", 0, chief=["a:1"], ps=["b:1"])]
NAMES = sorted({name for environ in ENVIRONMENTS for name in environ})
VALUES = sorted({value for environ in ENVIRONMENTS for value in environ.values() if len(value) < 200})

TEXTS = st.one_of(
    st.integers(0, len(VALUES) - 1).map(VALUES.__getitem__),
    st.text(max_size=8),
    st.text(alphabet="\udcff\ud800a1²٣,[]:/@%", max_size=8),
    st.integers(-2, 9).map(str),
    st.sampled_from(["auto", "localhost", "127.0.0.1:6000", "[fd00::4]:1", "n[1-2]", "2(x2)", "1:3"]),
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


def _outcome(environ: dict[str, str], launcher: str | None) -> Placement | tuple[str, str, str]:
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
@given(mixtures(), st.sampled_from([None, None, None, "none", *(launcher.name for launcher in INNERMOST_FIRST)]))
def test_any_mixture_gives_a_valid_placement_or_a_named_error(environ: dict[str, str], launcher: str | None) -> None:
    before = dict(environ)
    first = _outcome(environ, launcher)
    if isinstance(first, Placement):
        assert _is_valid(first)
        assert launcher in (None, first.launcher, "none")
    else:
        assert all(line.isprintable() for text in first for line in text.split("\n")), "no control characters in logs"
        assert first[1]
    assert _outcome(environ, launcher) == first, "the same for the same input"
    assert environ == before

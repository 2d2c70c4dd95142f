"""The check of all nodes on four hosts, of which one has bad links: these are named, and no others."""

from collections.abc import Iterator

import pytest
from bad_link import bad_link
from checked_hosts import BAD, check, four_hosts
from hosts import Hosts
from launched import needs_hosts

pytestmark = needs_hosts


@pytest.fixture(scope="module")
def four() -> Iterator[Hosts]:
    with four_hosts() as hosts:
        yield hosts


def test_healthy_links_are_not_named(four: Hosts, port: int) -> None:
    found = check(four, port)
    assert found.codes == [0, 0, 0, 0], found.output
    assert found.findings == []
    assert "warning" not in found.output


@pytest.mark.parametrize(
    "kind", ["slow", *(pytest.param(kind, marks=pytest.mark.all) for kind in BAD if kind != "slow")]
)
def test_bad_link_is_named(four: Hosts, port: int, kind: str) -> None:
    with bad_link(four, "three", **BAD[kind]):
        found = check(four, port)
    assert found.codes == [0, 0, 0, 0], found.output
    assert found.findings, found.output
    for finding in found.findings:
        assert finding.startswith(("two: ", "three: "))
        assert "to three" in finding or "three: " in finding or "reach three" in finding
    assert f"warning: {found.findings[0]}" in found.output
    assert found.report["findings"] == found.findings


@pytest.mark.all
def test_bad_link_stops_the_job_if_asked(four: Hosts, port: int) -> None:
    with bad_link(four, "three", **BAD["slow"]):
        found = check(four, port, DISTBOOT_CHECK="stop")
    assert set(found.codes) == {78}, found.output
    assert "the check before the start failed: t" in found.output

"""How a launcher reads an environment, of which an outer distboot may have exported a part."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from ..base.errors import DistbootError
from . import inherited
from .env_reader import EnvReader
from .inherited import InheritedEnv
from .launchers import Launcher
from .placement import NUMBERS, VARIABLES, Placement


class Environment(NamedTuple):
    """An environment, with and without what an outer distboot exported."""

    whole: Mapping[str, str]
    without_ours: Mapping[str, str]
    outer: InheritedEnv  # what `DISTBOOT_PLACEMENT` has; empty where it is not set

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Environment:
        without_ours, outer = inherited.restored(environ)
        return cls(environ, without_ours, outer)

    def for_launcher(self, launcher: Launcher) -> Mapping[str, str]:
        """What a launcher is to read.

        A launcher that has started processes below the outer distboot may have set the very values
        again: then they are its own.
        """
        mark = launcher.own_mark
        is_set_since = mark in self.whole and self.whole[mark] == self.without_ours.get(mark)
        if not is_set_since:
            return self.without_ours
        if launcher.sets_torch_vars:
            return self.whole
        environ = dict(self.whole)
        for name in VARIABLES.values():
            environ.pop(name, None)
            if name in self.without_ours:
                environ[name] = self.without_ours[name]
        return environ


def read(launcher: Launcher, environ: Mapping[str, str]) -> EnvReader:
    """All values that a launcher has in an environment, unchecked."""
    reader = EnvReader(
        environ,
        launcher.name,
        launcher.in_order,
        launcher.fallbacks,
        nodes_are_hosts=launcher.nodes_are_hosts,
    )
    reader.integers(*launcher.numbers, optional=launcher.optional)
    launcher.read(reader)
    for name, own in launcher.must_equal.items():
        place = launcher.numbers.index(own)
        number = reader.number(NUMBERS[place])
        reader.agree(name, number, reader.set_name(own))
    reader.job_id(*launcher.job_id_variables)
    return reader


def read_placement(launcher: Launcher, environ: Mapping[str, str]) -> Placement:
    """The placement of a process that a launcher started, by its claim or by the user's word."""
    reader = read(launcher, environ)
    return reader.placement()


def claimed(launcher: Launcher, environ: Mapping[str, str]) -> Placement | None:
    """The placement of a process that a launcher started; None if it did not."""
    if launcher.claims(environ):
        return read_placement(launcher, environ)
    return None


def claimed_whole(launcher: Launcher, environ: Mapping[str, str]) -> Placement | None:
    """As `claimed`; None also if its variables are incomplete or contradictory."""
    with suppress(DistbootError):
        return claimed(launcher, environ)
    return None


def found_markers(launcher: Launcher, environ: Mapping[str, str]) -> str:
    """The launcher's markers that are set, also where others may set them."""
    return ", ".join(filter(environ.__contains__, launcher.markers))


def specific_markers(launcher: Launcher, environ: Mapping[str, str]) -> str:
    """The launcher's markers that are set, for a note; empty for generic names."""
    if launcher.generic_names:
        return ""
    return found_markers(launcher, environ)

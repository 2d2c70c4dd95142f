"""How a launcher reads an environment, of which an outer distboot may have exported a part."""

from __future__ import annotations

from collections.abc import Mapping
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
        return cls(environ, *inherited.strip(environ))

    def for_launcher(self, launcher: Launcher) -> Mapping[str, str]:
        """What a launcher is to read.

        A launcher that has started processes below the outer distboot may have set the very values
        again: then they are its own.
        """
        if launcher.own_mark not in self.without_ours:
            return self.without_ours
        if launcher.sets_torch_vars:
            return self.whole
        exported = set(VARIABLES.values()) - self.without_ours.keys()
        return {name: text for name, text in self.whole.items() if name not in exported}


def read(launcher: Launcher, environ: Mapping[str, str]) -> EnvReader:
    """All values that a launcher has in an environment, unchecked."""
    reader = EnvReader(
        environ, launcher.name, launcher.in_order, nodes_are_hosts=launcher.nodes_are_hosts
    )
    names = launcher.numbers
    if launcher.instead:
        names = tuple(_or_instead(launcher, reader, name) for name in names)
    reader.integers(*names, optional=launcher.optional)
    launcher.more(reader)
    for name, own in launcher.same.items():
        if name in environ:
            number = reader.number(NUMBERS[launcher.numbers.index(own)])
            reader.agree(name, number, str(_or_instead(launcher, reader, own)))
    reader.job_id(*launcher.job_id)
    return reader


def _or_instead(launcher: Launcher, reader: EnvReader, name: str | None) -> str | None:
    """A variable, or the one to read where it is missing."""
    if name is None:
        return None
    return reader.first(name, launcher.instead.get(name, name))


def read_placement(launcher: Launcher, environ: Mapping[str, str]) -> Placement:
    """The placement of a process that a launcher started, by its claim or by the user's word."""
    return read(launcher, environ).placement()


def claimed(launcher: Launcher, environ: Mapping[str, str]) -> Placement | None:
    """The placement of a process that a launcher started; None if it did not."""
    if not launcher.claims(environ):
        return None
    return read_placement(launcher, environ)


def claimed_whole(launcher: Launcher, environ: Mapping[str, str]) -> Placement | None:
    """As `claimed`; None also if its variables are incomplete or contradictory."""
    try:
        return claimed(launcher, environ)
    except DistbootError:
        return None


def markers_present(launcher: Launcher, environ: Mapping[str, str]) -> str:
    """The launcher's markers that are set, for a note; empty for generic names (`generic_names`)."""
    if launcher.generic_names:
        return ""
    return ", ".join([name for name in launcher.markers if name in environ])

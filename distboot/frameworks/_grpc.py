"""gRPC, with which TensorFlow and JAX reach the other ranks, and the proxies that would catch it, even on loopback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# gRPC, http_proxy_mapper.cc: in this order, and in lower case only. The first that is there is the one it reads.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXIES = ("no_grpc_proxy", "no_proxy")


def past_proxies(environ: Mapping[str, str], hosts: Sequence[str]) -> dict[str, str]:
    """What keeps gRPC from going to the peers through a proxy, where it takes waiting for ever for the way there."""
    if not any(environ.get(name) for name in _PROXIES):
        return {}
    known = next((environ[name].split(",") for name in _NO_PROXIES if name in environ), [])
    missing = [host for host in hosts if host not in known]
    return {_NO_PROXIES[0]: ",".join([*filter(None, known), *missing])} if missing else {}

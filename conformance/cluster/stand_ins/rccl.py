"""Stand-in for RCCL: which network plugin it opens, of the process that asks. Ranks ask by the probe of placement.py.

As RCCL 2.27.7 of ROCm 7.1 and 7.2 does it (its src/plugin/net.cc and plugin_open.cc; ROCm/rocm-systems PR 4201 on the default).
Not as there: a library that loads is taken for a plugin, and is not started.
"""

import ctypes
from collections.abc import Mapping

DEFAULT = "libnccl-net.so"  # and not librccl-net.so, under which OLCF's module and others have it


def names(environ: Mapping[str, str]) -> list[str]:
    """What it passes to dlopen, in this order, until one loads."""
    candidates = []
    for name in filter(None, environ.get("NCCL_NET_PLUGIN", DEFAULT).split(",")):
        candidates.append(name)
        if "/" not in name and not (name.startswith("lib") and name.endswith(".so")):
            candidates.append(f"librccl-net-{name}.so")
    return candidates


def opens(environ: Mapping[str, str]) -> str:
    """The first that loads, or nothing: RCCL then goes over TCP, or ends where NCCL_NET asks for the plugin."""
    for name in names(environ):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return ""

"""DDP_FAULT: cause a fault on purpose, to see how a run handles it before a machine causes one. Off unless it is set.

    DDP_FAULT="kill step=20 rank=1" train.py ...

WHAT      kill (SIGKILL), hang (for ever), hold (until kill -CONT), nan (a parameter of this rank), enospc (a full disk),
          slow (seconds=30 by default)
POINT     step, save (before this rank writes a file of a snapshot; the only one for enospc), evaluation or end: step=20 is
          the first one from step 20 on
rank=0    where it happens; start=0: in which start of the job, so that it does not return with every requeue
"""

import errno
import os
import signal
import time
from collections.abc import Mapping

from ddp_core.errors import PreflightError

KINDS, POINTS = ("kill", "hang", "hold", "nan", "enospc", "slow"), ("step", "save", "evaluation", "end")
_planned: dict = {}


def plan(environ: Mapping[str, str], rank: int, start: int) -> None:
    """Plan the fault of this process, if it has one. Raises PreflightError if DDP_FAULT cannot be read."""
    text = environ.get("DDP_FAULT", "")
    kind, *words = text.split() or [""]
    values = dict(rank=0, start=0, seconds=30)
    point, after = ("save", 0) if kind == "enospc" else ("step", 0)
    for name, equals, value in (word.partition("=") for word in words):
        if name in POINTS and (value.isdecimal() or not equals):
            point, after = name, int(value or 0)
        elif name in values and value.isdecimal():
            values[name] = int(value)
        else:
            kind = ""
    if text and (kind not in KINDS or (kind == "enospc" and point != "save") or (kind == "nan" and point != "step")):
        raise PreflightError(f"DDP_FAULT={text[:80]!r}, but should be like 'kill step=20 rank=1': see ddp_core.rehearsal")
    _planned.clear()
    if text and (values["rank"], values["start"]) == (rank, start):
        _planned.update(values, kind=kind, point=point, after=after)


def rehearse(point: str, step: int, model=None) -> None:
    """Cause the planned fault if this is its point; once only."""
    if not _planned or _planned["point"] != point or step < _planned["after"]:
        return
    kind, seconds = _planned["kind"], _planned["seconds"]
    _planned.clear()
    print(f"DDP_FAULT: {kind} at {point}, step {step}, process {os.getpid()}", flush=True)
    if kind == "nan":
        next(model.parameters()).data.fill_(float("nan"))
    elif kind == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif kind in ("kill", "hold"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    else:
        time.sleep(10**8 if kind == "hang" else seconds)

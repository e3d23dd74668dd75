"""Ranks who know each other by what horovodrun exports, and sum a tensor in the order of the ranks. https://horovod.readthedocs.io"""

import os
import re
import time
from http.client import HTTPConnection, HTTPException

import torch

Average, Sum = object(), object()
SECONDS = float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "30"))
if os.environ.get("STAND_IN_LATE_RANK", "none") == os.environ.get("RANK"):
    time.sleep(1.5 * SECONDS)  # as where a file system is slow
EXPORTED = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "HOSTNAME", "CONTROLLER", "CPU_OPERATIONS")
EXPORTED += ("GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT")
_place: dict[str, str] = {}
_calls: dict[str, int] = {}


def nccl_built() -> bool:
    return False


def init() -> None:
    """A world of one where nothing is exported. Raises RuntimeError where half of it is, or a rank does not come."""
    _place.update({name: os.environ[f"HOROVOD_{name}"] for name in EXPORTED if f"HOROVOD_{name}" in os.environ})
    if not _place:
        _place.update(RANK="0", SIZE="1")
    elif len(_place) < len(EXPORTED) or not _place["CONTROLLER"] == _place["CPU_OPERATIONS"] == "gloo":
        raise RuntimeError(f"{_place}: horovodrun exports more, or this is MPI's")
    elif _place["SIZE"] != _place["LOCAL_SIZE"] and re.match(r"127\.|localhost|::1", _place["GLOO_RENDEZVOUS_ADDR"]):
        raise RuntimeError(f"{_place['GLOO_RENDEZVOUS_ADDR']}: each node is that to itself, and rank 0 is on the first one")
    else:
        _refuse_neighbours_of_one_place()
    _gathered("init", b"")


def _refuse_neighbours_of_one_place() -> None:
    """Horovod takes ranks with one HOSTNAME for neighbours, whose local ranks must differ."""
    mine = " ".join(_place[name] for name in ("HOSTNAME", "LOCAL_RANK")).encode()
    if (places := _gathered("place", mine)).count(mine) > 1:
        raise RuntimeError(f"{[place.decode() for place in places]}: two ranks of one node have one local rank")


def size() -> int:
    return int(_place["SIZE"])


def rank() -> int:
    return int(_place["RANK"])


def allreduce_(tensor: torch.Tensor, average=None, name: str = "", op: object = None) -> torch.Tensor:
    """In place: the average over the ranks, or the sum where op says so."""
    parts = [torch.frombuffer(bytearray(text), dtype=tensor.dtype) for text in _gathered(name, tensor.numpy().tobytes())]
    total = torch.stack(parts).sum(0).view_as(tensor)
    return tensor.copy_(total if op is Sum or average is False else total / size())


def shutdown() -> None:
    _place.clear()


def _gathered(name: str, own: bytes) -> list[bytes]:
    """What each rank has brought to this call of that name, in their order."""
    if size() == 1:
        return [own]
    _calls[name] = _calls.get(name, 0) + 1
    path = f"/{name}-{_calls[name]}"
    _asked("PUT", f"{path}/{rank()}", own)
    return [_asked("GET", f"{path}/{other}") for other in range(size())]


def _asked(method: str, path: str, text: bytes = b"") -> bytes:
    """The answer, as soon as there is one. Raises RuntimeError: Horovod's word for a rank that was lost."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        server = HTTPConnection(_place["GLOO_RENDEZVOUS_ADDR"], int(_place["GLOO_RENDEZVOUS_PORT"]), timeout=SECONDS)
        try:
            server.request(method, path, text)
            answer = server.getresponse()
            if answer.status == 200:
                return answer.read()
        except (OSError, HTTPException) as error:
            raise RuntimeError(f"{path}: {error}") from error
        finally:
            server.close()
        time.sleep(0.002)
    raise RuntimeError(f"{path} is missing after {SECONDS} s")

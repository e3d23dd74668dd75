"""pytest in the fork of a process that has imported torch: importing it takes two seconds, and there are hundreds of sessions.

    python -S -E conformance/broken/warm.py SOCKET ARGUMENTS     is `python -m pytest ARGUMENTS`

pytest() starts the server behind the socket, and returns this command. mpiexec can start it: the fork has its environment, its
folder and its open files, MPI's among them. It waits for the fork, ends as that does, and the fork ends with it.
"""

import functools
import json
import os
import socket
import sys

IMPORTED = ("torch", "torch.distributed", "numpy", "safetensors.torch", "mpi4py", "pytest")  # and nothing of this repository


@functools.cache
def pytest() -> list[str]:
    """The command. The server ends with this process."""
    import atexit
    import subprocess
    import tempfile

    path = os.path.join(tempfile.mkdtemp(prefix="warm-", dir="/tmp"), "socket")  # its path has 107 bytes at most
    environ = os.environ | dict(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL")
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, __file__, path], env=environ, stdin=pipe, stdout=pipe, text=True)
    atexit.register(server.communicate)  # until then its standard input is open
    assert server.stdout and server.stdout.readline() == "ready\n", "the server has not started"
    return [sys.executable, "-S", "-E", __file__, path]


def ask(path: str, arguments: list[str]) -> int:
    """For a fork of the server; its exit code."""
    files = [0, 1, 2, *(int(os.environ[name]) for name in ("PMI_FD",) if name in os.environ)]
    request = dict(files=files, arguments=arguments, folder=os.getcwd(), environ=dict(os.environ))
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [b"."], files)
        server.sendall(json.dumps(request).encode() + b"\n")
        answer = b"".join(iter(lambda: server.recv(16), b""))  # to its end
    return int(answer or 1)


def serve(path: str) -> None:
    """Until standard input ends, which is when who has started it does."""
    import importlib
    import select
    import shutil
    import signal

    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(64)
        print("ready", flush=True)
        while listening in select.select([listening, sys.stdin], [], [])[0]:
            connection, _ = listening.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                become(connection)
            connection.close()
    shutil.rmtree(os.path.dirname(path))


def become(connection: socket.socket) -> None:
    """This fork is now the process that has asked for it; it ends here."""
    import atexit
    import fcntl
    import gc

    import pytest

    files = socket.recv_fds(connection, 1, 16)[1]
    request = json.loads(connection.makefile().readline())
    # Out of the way of the numbers that they shall have.
    files = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 200) for file in files]
    asked_by = socket.socket(fileno=fcntl.fcntl(connection.detach(), fcntl.F_DUPFD_CLOEXEC, 200))
    for file, number in zip(files, request["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    fcntl.fcntl(asked_by, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(asked_by, fcntl.F_SETFL, os.O_ASYNC)  # a SIGIO, which ends this process, when who has asked was killed
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    sys.argv = ["pytest", *request["arguments"]]
    sys.path[:1] = [request["folder"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    gc.freeze()  # what is shared is not looked through, and so not copied
    code = int(pytest.main(request["arguments"]))
    asked_by.sendall(str(code).encode())
    atexit._run_exitfuncs()
    if (mpi := sys.modules.get("mpi4py.MPI")) and mpi.Is_initialized():
        mpi.Finalize()  # as Python does at its end: mpiexec kills all when a rank ends without it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
    serve(sys.argv[1])

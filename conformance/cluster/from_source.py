"""Stand-in for mpi4py's source, which `pip install --no-binary=mpi4py` builds on a node. prefix.py packs it with PyPI's wheel.

Compiling the real source takes more than a minute, most of it for one C file of 13 MB. This stand-in looks for a compiler where
mpi4py does (MPICC, else mpicc on PATH), and compiles and links the same small program. The rest comes from PyPI's wheel for
MPICH: both need libmpi.so.12, which is found when a program starts. Another MPI is an error.
"""

import base64
import hashlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LIBRARY = b"libmpi.so.12\0"
PROGRAM = """
#include <mpi.h>
int main(int argc, char **argv)
{
    int ierr = MPI_Init(&argc, &argv);
    ierr = MPI_Finalize();
    return ierr;
}
"""


def build_wheel(wheel_directory: str, config_settings=None, metadata_directory=None) -> str:
    compiler = shlex.split(os.environ.get("MPICC") or "mpicc")
    print(f"stand-in for mpi4py's source: {shlex.join(compiler)} builds a small program, and PyPI's wheel has the rest")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.c").write_text(PROGRAM)
        for what, arguments in dict(compile=["-fPIC", "-c", "program.c"], link=["program.o", "-o", "program"]).items():
            try:
                subprocess.run([*compiler, *arguments], cwd=folder, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                sys.exit(f"error: Cannot {what} MPI programs. Check your configuration!!! ({error})")
        if LIBRARY not in Path(folder, "program").read_bytes():
            sys.exit(f"error: {shlex.join(compiler)} links another MPI than {LIBRARY[:-1].decode()}")
    (ready,) = Path(__file__).parent.glob("*.whl")
    name = f"{re.sub('-(many|musl)linux.*', '', ready.stem)}-linux_{os.uname().machine}.whl"
    record = []
    with zipfile.ZipFile(ready) as old, zipfile.ZipFile(Path(wheel_directory, name), "w") as new:
        for path in old.namelist():
            if ".openmpi." in path or path.endswith("/RECORD"):
                continue
            content = old.read(path)
            if path == "mpi4py/__init__.py":  # the removed part chooses among several MPIs
                content = content[: content.index(b"from . import _mpiabi")]
            place = path.replace(".mpich.", ".")
            new.writestr(place, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            record.append(f"{place},sha256={digest},{len(content)}\n")
        path = next(path for path in old.namelist() if path.endswith("/RECORD"))
        new.writestr(path, "".join([*record, f"{path},,\n"]))
    return name

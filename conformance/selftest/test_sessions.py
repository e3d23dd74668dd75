"""The sessions of noxfile.py: which commands `python -m conformance` starts, and when environment.py calls pip."""

import hashlib
import re
import subprocess
import zipfile

import pytest

from conformance import __main__ as program
from conformance.harness import environment, lock, sites
from conformance.harness.target import read_records

SITES = [site.folder.name for site in sites.find()]
FIRST = SITES[0]
SITE = f"--site={sites.ROOT}/conformance/broken/sound"


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """The commands that main() would start, with their world sizes. A command that contains a word of `commands.fail` fails."""

    class Commands(list):
        fail: dict[str, int] = {}

    commands = Commands()

    def code_of(command, world_size=1, log=None):
        commands.append((" ".join(command), world_size))
        code = next((code for word, code in commands.fail.items() if word in commands[-1][0]), 0)
        if log:
            log.write_text(f"exit code {code}\n")
        return code

    for name in ("PATH", "OMP_NUM_THREADS", "MPIEXEC_TIMEOUT"):  # monkeypatch restores these afterwards
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("MPIEXEC", raising=False)
    monkeypatch.setattr(program, "code_of", code_of)
    monkeypatch.setattr(program, "ROOT", tmp_path)
    return commands


def test_a_sites_files_are_read_and_it_trains_in_2_4_and_1_ranks(commands):
    assert program.main([SITE, "--clause", "R3"]) == 0
    static, *ranks, report = commands
    assert "test_static.py" in static[0] and static[1] == 1
    assert [size for _, size in ranks] == [2, 4, 1]
    assert all(f"mpiexec -n {size} " in line and "--with-mpi --backend=auto" in line for line, size in ranks)
    assert all(f"{SITE} --clause R3" in line for line, _ in (static, *ranks))
    assert "conformance.report --parts" in report[0]


def test_everything_runs_whatever_fails(commands):
    commands.fail = {"mpiexec -n 2 ": 1, f"--site={FIRST}": 1}
    message = program.main([])
    assert message.endswith(f"\n\n3 of {len(SITES) + 6} commands above failed") and f"{FIRST}: failed, see " in message
    assert "sites-2: failed, see " in message and "core-2: failed, see " in message
    assert len(commands) == len(SITES) + 7


def test_ranks_of_several_sites_run_in_halves_that_are_all(commands):
    """One half runs what the other leaves out by --about. With a single site or chosen checks there is one command."""
    program.main([])
    halves = [line for line, _ in commands if "--with-mpi" in line]
    assert sorted(line.rpartition(" ")[2] for line in halves) == ["--about=core"] * 3 + ["--about=sites"] * 3
    assert len({line.rpartition(" ")[0] for line in halves}) == 3
    for flags in ([SITE], ["--clause", "R3"]):
        commands.clear()
        program.main(flags)
        assert not any("--about" in line for line, _ in commands)


def test_a_command_to_which_a_choice_leaves_nothing_is_no_failure(commands):
    """Files, ranks or a site may select no check. If all commands have none, the report is refused (test_report)."""
    for nothing in (f"--site={FIRST}", "test_static", "mpiexec"):
        commands.fail = {nothing: 5}
        assert program.main(["-k", "words"]) == program.main([SITE, "--clause", "J3"]) == 0
        assert "failed" in program.main([])


def test_a_report_that_cannot_be_drawn_is_a_failure(commands):
    commands.fail = {"conformance.report": 1}
    assert program.main([SITE]) == program.main(["extras"]) == program.main(["suite"]) == 1


def test_submit_starts_no_ranks(commands):
    assert program.main([SITE, "--submit=--account=abc --qos=x", "--device", "cuda"]) == 0
    [jobs, _] = commands
    assert "--submit=--account=abc --qos=x --device=cuda" in jobs[0] and "mpiexec" not in jobs[0] and "static" not in jobs[0]


def test_another_mpiexec(commands):
    program.main(["--mpiexec", "srun --mpi=pmix", SITE])
    assert [line.split(" -m ")[0].rsplit(" ", 1)[0] for line, _ in commands[-4:-1]] == [
        f"srun --mpi=pmix -n {n}" for n in (2, 4, 1)
    ]


def test_as_many_ranks_as_devices(commands, monkeypatch):
    monkeypatch.setattr(program, "devices", lambda kind: 3)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # monkeypatch restores it afterwards
    program.main(["--device", "cuda"])
    assert [size for _, size in commands[:-1]] == [1, 3, 2, 4]
    assert ["--backend=gloo" in line for line, _ in commands[:-1]] == [False, False, True, True]
    assert not any("test_static" in line for line, _ in commands)


def test_no_such_device(commands, monkeypatch):
    monkeypatch.setattr(program, "devices", lambda kind: 0)
    assert "sees no such device" in program.main(["--device", "xpu"])
    assert not commands


def test_no_such_site(commands, capsys):
    with pytest.raises(SystemExit) as excinfo:
        program.main(["extras", "--site", "nowhere"])
    assert excinfo.value.code == 2 and "--site nowhere is neither one of" in capsys.readouterr().err


def test_a_site_elsewhere_keeps_its_own_reports(commands, tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere") / "mymachine"
    folder.mkdir()
    (folder / "site.toml").write_text('name = "mymachine"\n')
    program.main(["--site", str(folder)])
    assert commands[-1][0].endswith(f"--reports={folder}/reports")


# ---- installation ---------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """The calls of pip by environment.py, in a temporary environment and repository. A None makes the next call fail."""
    calls: list[str] = []
    (tmp_path / "core").mkdir()
    for name in ("constraints.txt", "constraints.lock", "core/pyproject.toml"):
        (tmp_path / name).write_text("pytest==1\n")
    (tmp_path / "constraints-torch.txt").write_text("torch==2\n")

    def pip(*arguments):
        if calls and calls[-1] is None:
            raise subprocess.CalledProcessError(1, "pip")
        calls.append(" ".join(arguments))

    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "pip", pip)
    monkeypatch.setattr(environment.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    return calls


def test_pip_is_not_started_where_all_is_there(installed):
    assert environment.main(["pytest", "--last", "wandb"]) == 0
    called = [call.partition(" -c ")[0] for call in installed]
    cpu = f"--no-deps --retries 0 --index-url {environment.CPU_WHEELS} torch==2"
    assert called == ["pytest", cpu, "torch", "setuptools", "--no-build-isolation -e core", "wandb"]
    before = [*installed]
    assert environment.main(["pytest", "--last", "wandb"]) == 0
    assert installed == before


@pytest.mark.parametrize("file", [*environment.LISTS, "core/pyproject.toml"])
def test_a_changed_file_is_installed_anew(installed, tmp_path, file):
    environment.main(["pytest"])
    installed.clear()
    (tmp_path / file).write_text("torch==3\n")
    assert environment.main(["pytest"]) == 0
    assert installed


def test_other_packages_are_installed(installed):
    environment.main(["pytest"])
    installed.clear()
    environment.main(["pytest", "numpy"])
    assert installed[0] == "pytest numpy -c constraints.lock --no-require-hashes"


def test_without_torch_nothing_else_is_installed(installed):
    environment.main(["pytest", "--no-torch"])
    assert installed == ["pytest -c constraints.lock --no-require-hashes"]


@pytest.mark.parametrize("locked", [True, False])
def test_a_file_of_another_hash_is_refused(monkeypatch, tmp_path, capfd, locked):
    """pip checks the hashes that it gets. In the same call it installs packages that have none."""
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment.site, "getsitepackages", lambda: [str(tmp_path)])
    pip = environment.pip
    here = ("--no-index", "--disable-pip-version-check", f"--find-links={tmp_path}", f"--target={tmp_path / 'installed'}")
    monkeypatch.setattr(environment, "pip", lambda *flags: pip(*flags, *here))
    (tmp_path / "core").mkdir()
    for name in (*environment.LISTS, "core/pyproject.toml"):
        (tmp_path / name).write_text("")
    for name in ("pinned", "loose"):
        wheel = tmp_path / f"{name}-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr(f"{name}.py", "")
            file.writestr(f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
            file.writestr(f"{name}-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            file.writestr(f"{name}-1.dist-info/RECORD", "")
    good = hashlib.sha256((tmp_path / "pinned-1-py3-none-any.whl").read_bytes()).hexdigest()
    (tmp_path / "constraints.lock").write_text(f"pinned==1 --hash=sha256:{good if locked else '0' * 64}\n")
    assert environment.main(["--no-torch", "pinned", "loose"]) == (0 if locked else 1)
    assert (tmp_path / "installed/pinned.py").exists() == (tmp_path / "installed/loose.py").exists() == locked
    assert ("DO NOT MATCH THE HASHES" in capfd.readouterr().err) != locked


def test_the_lock_has_each_pinned_version_with_its_files():
    """`nox -s lint` checks this too; this test helps whoever edits one file by hand."""
    lines = (environment.ROOT / "constraints.lock").read_text().splitlines()[1:]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+( --hash=sha256:[0-9a-f]{64})+ # 20\d\d-\d\d-\d\d", line) for line in lines)
    pinned = [line for line in (environment.ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    assert sorted(line.split()[0] for line in lines) == sorted(pinned)


def test_files_of_a_version_by_their_names():
    names = ("numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl", "pytest_mpi-0.6.tar.gz", "outcome-1.3.0.post0.zip")
    assert [lock.version_of(name) for name in names] == ["2.4.6", "0.6", "1.3.0.post0"]


PYTEST = dict(filename="pytest-9.9.8.tar.gz", hashes=dict(sha256="0" * 64), **{"upload-time": "2031-05-04T10:00:00Z"})


def test_a_version_without_files_is_named(monkeypatch, tmp_path, capsys):
    (tmp_path / "constraints.txt").write_text("# pinned\npytest==9.9.9\n")
    monkeypatch.setattr(lock, "ROOT", tmp_path)
    monkeypatch.setattr(lock, "files", lambda name: [PYTEST])
    assert lock.main() == 1 and not (tmp_path / "constraints.lock").exists()
    assert "has no file of pytest==9.9.9" in capsys.readouterr().err
    (tmp_path / "constraints.txt").write_text("pytest==9.9.8\n")
    assert lock.main() == 0
    assert (tmp_path / "constraints.lock").read_text().splitlines()[1] == f"pytest==9.9.8 --hash=sha256:{'0' * 64} # 2031-05-04"


def test_a_broken_installation_is_tried_again(installed):
    environment.main(["pytest"])
    installed.append(None)
    assert environment.main(["pytest", "numpy"]) == 1
    installed.clear()
    assert environment.main(["pytest"]) == 0  # a complete environment may lack packages later
    assert installed


def test_a_package_whose_version_stands_nowhere_is_named(installed, tmp_path, capsys):
    """Its version would change some day in CI without any change in the repository."""
    for name, version in (("pytest", "1"), ("torch", "2+cpu"), ("pip", "26"), ("Own_Thing", "3")):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info/METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    assert environment.main(["--all-pinned"]) == 1
    assert capsys.readouterr().err.startswith("error: Own_Thing==3: here, and not so in constraints.txt")
    (tmp_path / "constraints.txt").write_text("pytest==1\nown-thing==3\n")
    assert environment.main(["--all-pinned"]) == 1
    assert capsys.readouterr().err == "error: own-thing==3: in constraints.txt or .lock, not in both: nox -s lock\n"
    (tmp_path / "constraints.lock").write_text("# by lock\npytest==1 --hash=sha256:0\nown-thing==3 --hash=sha256:0\n")
    assert environment.main(["--all-pinned"]) == 0 and not installed


@pytest.mark.parametrize("end, steps", [("", [0, 1]), ('{"kind":"st', [0, 1]), ('{"kind":"step","step":2}', [0, 1, 2])])
def test_half_a_line_of_a_killed_run_is_no_record(tmp_path, end, steps):
    (tmp_path / "run.jsonl").write_text('{"kind":"step","step":0}\n{"kind":"step","step":1}\n' + end)
    assert [record["step"] for record in read_records(tmp_path)] == steps

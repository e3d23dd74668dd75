"""What the sessions of noxfile.py start: the commands of `python -m conformance`, and when pip is started (environment.py)."""

import subprocess

import pytest

from conformance import __main__ as program
from conformance.harness import environment, sites

SITES = [site.folder.name for site in sites.find()]
FIRST = SITES[0]
SITE = f"--site={sites.ROOT}/conformance/broken/sound"


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """Those that main() starts, each with its world size; none is run, and those with a word of `commands.fail` fail."""

    class Commands(list):
        fail: dict[str, int] = {}

    commands = Commands()

    def code_of(command, world_size=1, log=None):
        commands.append((" ".join(command), world_size))
        code = next((code for word, code in commands.fail.items() if word in commands[-1][0]), 0)
        if log:
            log.write_text(f"exit code {code}\n")
        return code

    for name in ("PATH", "OMP_NUM_THREADS", "MPIEXEC_TIMEOUT"):  # put back afterwards
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
    commands.fail = {"mpiexec -n 2": 1, f"--site={FIRST}": 1}
    told = program.main([])
    assert told.endswith(f"\n\n2 of {len(SITES) + 3} commands above failed") and f"{FIRST}: failed, see " in told
    assert len(commands) == len(SITES) + 4


def test_a_site_for_which_nothing_is_chosen_is_no_failure_unless_none_is_chosen(commands):
    commands.fail = {f"--site={FIRST}": 5}
    assert program.main(["-k", "words"]) == 0
    commands.fail = {"test_static": 5}
    assert "failed" in program.main(["-k", "words"])


def test_a_report_that_cannot_be_drawn_is_a_failure(commands):
    commands.fail = {"conformance.report": 1}
    assert program.main([SITE]) == program.main(["extras"]) == program.main(["suite"]) == 1


def test_submit_starts_no_ranks(commands):
    assert program.main([SITE, "--submit=--account=abc --qos=x", "--device", "cuda"]) == 0
    [jobs, _] = commands
    assert "--submit=--account=abc --qos=x --device=cuda" in jobs[0] and "mpiexec" not in jobs[0] and "static" not in jobs[0]


def test_another_mpiexec(commands):
    program.main(["--mpiexec", "srun --mpi=pmix"])
    assert [line.split(" -m ")[0].rsplit(" ", 1)[0] for line, _ in commands[-4:-1]] == [
        f"srun --mpi=pmix -n {n}" for n in (2, 4, 1)
    ]


def test_as_many_ranks_as_devices(commands, monkeypatch):
    monkeypatch.setattr(program, "devices", lambda kind: 3)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # put back afterwards
    program.main(["--device", "cuda"])
    assert [size for _, size in commands[:-1]] == [1, 3, 2, 4]
    assert ["--backend=gloo" in line for line, _ in commands[:-1]] == [False, False, True, True]
    assert not any("test_static" in line for line, _ in commands)


def test_no_such_device(commands, monkeypatch):
    monkeypatch.setattr(program, "devices", lambda kind: 0)
    assert "sees no such device" in program.main(["--device", "xpu"])
    assert not commands


def test_no_such_site(commands, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(["extras", "--site", "nowhere"])
    assert ended.value.code == 2 and "--site nowhere is neither one of" in capsys.readouterr().err


def test_a_site_elsewhere_keeps_its_own_reports(commands, tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere") / "mymachine"
    folder.mkdir()
    (folder / "site.toml").write_text('name = "mymachine"\n')
    program.main(["--site", str(folder)])
    assert commands[-1][0].endswith(f"--reports={folder}/reports")


# ---- what is installed, and when ------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """The calls of pip by environment.py, in an environment and a repository of its own; None makes the next call fail."""
    calls: list[str] = []
    (tmp_path / "core").mkdir()
    for name in ("constraints.txt", "core/pyproject.toml"):
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
    assert [call.partition(" -c ")[0] for call in installed[::2]] == ["pytest", "torch", "wandb"]
    before = [*installed]
    assert environment.main(["pytest", "--last", "wandb"]) == 0
    assert installed == before


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-torch.txt", "core/pyproject.toml"])
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
    assert installed[0] == "pytest numpy -c constraints.txt"


def test_a_broken_installation_is_tried_again(installed):
    environment.main(["pytest"])
    installed.append(None)
    assert environment.main(["pytest", "numpy"]) == 1
    installed.clear()
    assert environment.main(["pytest"]) == 0  # what was complete before may not be so any more
    assert installed


def test_a_package_whose_version_stands_nowhere_is_named(installed, tmp_path, capsys):
    """In CI it would be another one day, and nobody's change."""
    for name, version in (("pytest", "1"), ("torch", "2+cpu"), ("pip", "26"), ("Own_Thing", "3")):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info/METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    assert environment.main(["--all-pinned"]) == 1
    assert capsys.readouterr().err.startswith("error: Own_Thing==3: here, and not so in constraints.txt")
    (tmp_path / "constraints.txt").write_text("pytest==1\nown-thing==3\n")
    assert environment.main(["--all-pinned"]) == 0 and not installed

"""The report: how parts become one, and what is refused. All sites are made up; nothing is written into the repository.

python -m pytest conformance/selftest/test_report.py
"""

import datetime
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest

from conformance.broken import make
from conformance.golden import make as golden
from conformance.harness import files, sites
from conformance.harness.evidence import Evidence, margin
from conformance.report import __main__ as report
from conformance.report import merge, page, private, verify

clause, rejects = pytest.mark.clause, pytest.mark.rejects
GOLDEN = [loss.hex() for loss in golden.load()["losses"]]

SPEC = """
**T0** exact, **T1** 1e-10, in fp64, **T2** 1e-5, in fp32.

## L: losses

- **L1** Every step has a loss: `a`
  goes on < here.
- **L2** Losses are the golden ones.
- **L3** (untested) They stay so.

## V: verdicts

- **V1** The suite looks at itself.
"""
SITES = [
    dict(
        name="ash",
        verified=dict(
            status="simulated",
            date=datetime.date(2031, 5, 1),
            evidence="Two nodes, not real.",
            unverified=["The module\n  `sap/1.0` exists.", "<RCCL> opens that file."],
        ),
    ),
    dict(name="birch", verified=dict(status="never-run", date=datetime.date(2031, 5, 2))),
]


OF_ASH = dict(core="c0", conformance="f0", site="s0")  # the files of these parts


def part(rung="process", world_size=2, backend="gloo", expected=None, checks=(), curves=(), **others) -> dict:
    defaults = dict(format=1, rung=rung, backend=backend, device="cpu", world_size=world_size, objections=[])
    defaults |= dict(versions=dict(python="3.11.2", torch="2.13.0", mpi="MPICH", ddp_core="1.0"))
    defaults |= dict(machine=dict(cores=2, accelerator=None, accelerators=0))
    defaults |= dict(files=dict(core="c0", conformance="f0", sites=dict.fromkeys(("ash", "birch"), "s0")))
    return defaults | dict(expected=expected or {}, checks=[*checks], curves=[*curves]) | others


OTHERS = dict(files=dict(core="c1", conformance="f0", sites=dict(ash="s0")))


def checked(site="ash", clauses="L2", outcome="passed", **others) -> dict:
    defaults = dict(site=site, launcher="srun", name="losses_are_golden", case="", clauses=clauses.split(), outcome=outcome)
    return defaults | dict(message="", reason="", link="", what=None, deviation=None, limit=None) | others


def evidence(*dated: tuple[str, list[dict]], sites=SITES, spec=SPEC, now=None) -> Evidence:
    """Evidence from parts, by date. now: today's files, if they differ from the reports'."""
    merged = [one for date, parts in dated for one in merge.merge(parts, date, "abc1234")]
    return Evidence(merged, sites, spec, golden.load()["losses"], lambda site, rung: now or {})


def realistic() -> Evidence:
    """The reports of this repository, as if of today's files and two days, with a failure and an expected failure."""
    reports = [verify.read(path) for path in sorted((report.HERE / "reports").glob("*/*.json"))]
    next(document for document in reports if document["site"] == "core" and document["rung"] == "static")["date"] = "2026-11-01"
    one, other = [document for document in reports if document["rung"] == "process" and document["curves"]][:2]
    for document, name, changed in (
        (one, "C1", dict(outcome="failed", message="exit codes=[75, 0], but should be all 75 (C1)")),
        (other, "R3", EXPECTED | dict(clauses=["R3"])),
    ):
        next(check for check in document["checks"] if name in check["clauses"]).update(changed)
    tomls, spec = [site.toml for site in sites.find()], (report.HERE / "SPEC.md").read_text()
    return Evidence(reports, tomls, spec, golden.load()["losses"], lambda *_: {})


# ---- parts to reports ----------------------------------------------------------------------------------------------


@clause("V7")
def test_parts_of_a_run_become_one_report_a_site_rung_and_backend(tmp_path):
    parts = [part(world_size=size, checks=[checked(), checked("birch")], expected=dict(ash=["L2"])) for size in (4, 1)]
    parts.append(part("static", None, "none", checks=[checked("core", "V1", launcher=None)]))
    merged = merge.merge(parts, "2031-05-04", "abc1234", True)
    assert [(one["site"], one["rung"], one["world_sizes"], one["files"]["site"]) for one in merged] == [
        ("ash", "process", [1, 4], "s0"),
        ("birch", "process", [1, 4], "s0"),
        ("core", "static", [], None),
    ]
    assert [check["world_size"] for check in merged[0]["checks"]] == [1, 4]
    assert (merged[0]["date"], merged[0]["commit"], merged[0]["modified"]) == ("2031-05-04", "abc1234", True)
    path = merge.write(merged[0], tmp_path)
    assert path == tmp_path / "ash" / "process-gloo.json"
    assert verify.read(path) == merged[0]


@clause("V7")
def test_a_report_takes_the_place_of_an_older_one_alone(tmp_path):
    old, new = (merge.merge([part(checks=[checked()])], date)[0] for date in ("2031-05-04", "2031-05-05"))
    (other,) = merge.merge([part("static", None, "none", checks=[checked()])], "2031-05-03")
    for one in (old, other, new):
        merge.write(one, tmp_path)
    assert {path.name: verify.read(path)["date"] for path in (tmp_path / "ash").iterdir()} == {
        "process-gloo.json": "2031-05-05",
        "static-none.json": "2031-05-03",
    }
    with pytest.raises(ValueError, match="date=2031-05-04, but should be 2031-05-05 or later"):
        merge.write(old, tmp_path)


@clause("V7")
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([part(checks=[checked(outcome="perhaps")])], "outcome=perhaps"),
        ([part("ladder", checks=[checked()])], "rung=ladder"),
        ([part(checks=[checked("../ash")])], "backend=../ash"),
        ([part(backend="a/b", checks=[checked()])], "backend=a/b"),
        ([part(checks=[checked()]), part(world_size=4, checks=[checked()], versions=dict(torch="2.8.0"))], "versions="),
        ([part(checks=[checked()]), part(world_size=4, checks=[checked()], device="cuda")], "device=cuda"),
        ([part(checks=[checked()]), part(world_size=4, checks=[checked()], files=OTHERS["files"])], "files="),
    ],
)
def test_parts_that_cannot_be_are_refused(parts, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        merge.merge(parts, "2031-05-04")


@clause("V7")
def test_numbers_that_json_does_not_have_are_words(tmp_path):
    (one,) = merge.merge([part(checks=[checked(outcome="failed", deviation=math.inf, limit=1e-10)])], "2031-05-04")
    assert "Infinity" not in merge.write(one, tmp_path).read_text()
    assert [text for _, text, _ in Evidence([one], SITES, SPEC, [1.0], lambda *_: {}).worst()] == ["not comparable"]


@clause("V7")
def test_an_objection_of_a_session_is_a_failed_check_of_its_clause():
    seen = evidence(("2031-05-04", [part(objections=["2 required checks were skipped, but should have run (V1)"])]))
    assert seen.cells["core", "V1"].state == "failed"


# ---- cells ---------------------------------------------------------------------------------------------------------

PASSED, FAILED = checked(), checked(outcome="failed", message="losses=1, but should be 2 [ash] (L2)")
EXPECTED = checked(outcome="expected-failure", reason="the launcher miscounts", link="https://example.org/1")


@clause("V7", "V13")
@pytest.mark.parametrize(
    ("dated", "cell"),
    [
        ([("05-04", [part(checks=[PASSED])])], ("pass", "process", "05-04")),
        ([("05-04", [part(checks=[PASSED, FAILED, EXPECTED])])], ("failed", "process", "05-04")),
        ([("05-04", [part(checks=[PASSED, EXPECTED])])], ("expected failure", "process", "05-04")),
        ([("05-04", [part(checks=[checked(outcome="skipped")])])], ("not run", "", "")),
        ([("05-04", [part(expected=dict(ash=["L2"]))])], ("not run", "", "")),
        ([], ("not run", "", "")),
        # A pass counts from its strongest rung, with that date. A failure counts from any rung.
        ([("05-02", [part("machine", checks=[PASSED])]), ("05-04", [part(checks=[PASSED])])], ("pass", "machine", "05-02")),
        ([("05-02", [part("machine", checks=[PASSED])]), ("05-04", [part(checks=[FAILED])])], ("failed", "process", "05-04")),
        ([("05-04", [part("static", None, checks=[PASSED]), part("device", backend="nccl")])], ("pass", "static", "05-04")),
        # Two backends on one rung are two reports.
        (
            [("05-03", [part("device", checks=[FAILED])]), ("05-04", [part("device", 2, "nccl", checks=[PASSED])])],
            ("failed", "device", "05-03"),
        ),
        # A report of other files is no evidence.
        ([("05-04", [part(checks=[PASSED], **OTHERS)])], ("of other files", "process", "05-04")),
        ([("05-04", [part(checks=[FAILED], **OTHERS)])], ("of other files", "process", "05-04")),
        ([("05-04", [part(expected=dict(ash=["L2"]), **OTHERS)])], ("not run", "", "")),
        (
            [("05-02", [part("machine", checks=[FAILED], **OTHERS)]), ("05-04", [part(checks=[PASSED])])],
            ("pass", "process", "05-04"),
        ),
    ],
)
def test_state_of_a_clause_at_a_site(dated, cell):
    seen = evidence(*dated, now=OF_ASH).cells["ash", "L2"]
    assert (seen.state, seen.rung, seen.date) == cell


@clause("V7")
def test_untested_is_not_a_failure_to_run_and_the_core_is_not_asked_what_sites_are():
    seen = evidence(("2031-05-04", [part(checks=[PASSED, checked("core", "V1")])]))
    assert {clause: seen.cells["ash", clause].state for clause in seen.spec.clauses} == dict(
        L1="not run", L2="pass", L3="untested", V1="elsewhere"
    )
    assert [seen.cells["core", clause].state for clause in ("L2", "L3", "V1")] == ["elsewhere", "elsewhere", "pass"]


@clause("V7")
def test_a_clause_that_should_have_run_and_has_not_is_named():
    two = part(expected=dict(ash=["L1", "L2"], birch=["L2"]), checks=[PASSED, checked("birch", outcome="skipped")])
    assert merge.not_run([two, part(world_size=4, expected=dict(ash=["L2"]), checks=[FAILED])]) == [
        "checks run=0, but should be at least 1 [ash, process rung, gloo, world size 2] (L1)",
        "checks run=0, but should be at least 1 [birch, process rung, gloo, world size 2] (L2)",
    ]


@clause("V7")
def test_checks_with_one_message_are_one_entry():
    parts = [part(world_size=size, checks=[FAILED, FAILED | dict(launcher="mpiexec")]) for size in (1, 2)]
    ((site, name, text, _),) = evidence(("2031-05-04", parts)).notes("failed")
    assert (site, name) == ("ash", "L2")
    assert text.startswith("losses_are_golden [process rung, mpiexec, srun, world size 1, 2]: losses=1, but should be 2")


@clause("V7")
def test_margins_and_the_worst_deviation_of_each_tier():
    cases = {(9.8e-16, 1e-10): "9.8e-16, 100,000 times below", (2e-5, 1e-5): "2.0e-05, 2.0 times above", (0.0, 0.0): "exact"}
    cases |= {(0.0, 1e-5): "exact", (1e-16, 0.0): "1.0e-16, should be exact", ("inf", 1e-5): "not comparable"}
    assert {pair: margin(dict(deviation=pair[0], limit=pair[1])) for pair in cases} == cases
    checks = [checked(deviation=1e-16, limit=1e-10), checked("birch", deviation=1e-15, limit=1e-10)]
    checks += [checked("core", "V1", launcher=None, deviation=3e-6, limit=1e-5)]
    assert evidence(("2031-05-04", [part(checks=checks)])).worst() == [
        ("T1, fp64: limit 1e-10", "1.0e-15, 100,000 times below", "birch, srun, process rung, world size 2"),
        ("core: limit 1e-5", "3.0e-06, 3.3 times below", "core, process rung, world size 2"),
    ]


# ---- reports of other files ----------------------------------------------------------------------------------------


@clause("V13")
@rejects("V13")
@pytest.mark.parametrize("name", ["core", "conformance", "site"])
def test_a_report_of_other_files_is_named_and_is_no_evidence(name):
    curve = dict(site="ash", launcher="srun", precision="fp64", losses=GOLDEN)
    parts = [part(checks=[checked(deviation=0.0, limit=0.0)], curves=[curve])]
    assert evidence(("2031-05-04", parts), now=OF_ASH).cells["ash", "L2"].state == "pass"
    seen = evidence(("2031-05-04", parts), now=OF_ASH | {name: "another"})
    html = page.render(seen)
    assert "1 report of other files than those here, no evidence for these" in html and f"of other files: {name}</span>" in html
    assert 'class="state pass"' not in html and "No report has a curve yet." in html and seen.worst() == []
    assert "≠ 1 of other files<br>○ 1 not run<br>· 1 untested<br>process<br>2031-05-04" in page.markdown(seen)
    assert "ash    ≠1 ○1" in report.terminal(seen, False)


@clause("V13")
@rejects("V13")
def test_what_failed_in_a_report_of_other_files_is_counted_and_named():
    """A failure is not silent because one line of the core has changed since."""
    checks = [FAILED, FAILED | dict(clauses=["L1", "L2"], case="fp16"), PASSED]
    dated = ("2031-05-04", [part("device", 1, "nccl", checks=checks), part("static", None, "none", checks=[PASSED])])
    words = "2 checks failed (ash, device rung, nccl, 2031-05-04: L1, L2)"
    other = evidence(dated, now=dict(core="another"))
    assert f"## Failed\n\nNone.\n\nOf other files: {words}.\n" in page.markdown(other)
    assert f"2 reports of other files than those here, no evidence for these: {words}." in page.render(other)
    same = evidence(dated)
    assert "f other files:" not in page.markdown(same) + page.render(same) and "**L1** at ash" in page.markdown(same)


@clause("V7")
def test_a_site_without_extras_brings_none():
    """It has not failed to run them. A site that brings one has."""
    spec = SPEC + "\n## E: extras\n\n- **E1** They run.\n- **E2** They train.\n"
    tomls = [SITES[0], SITES[1] | dict(extras=[dict(name="notebook")])]
    seen = evidence(("2031-05-04", [part(checks=[PASSED, checked("ash", "L1")])]), sites=tomls, spec=spec)
    assert "| **E** extras | · none brought | ○ 2 not run |" in page.markdown(seen)
    html = page.render(seen)
    assert html.count("none brought</span>") == 3 and 'class="state none-brought"' in html


@pytest.fixture
def ash(tmp_path) -> sites.Site:
    folder = shutil.copytree(sites.ROOT / "conformance/broken/sound", tmp_path / "ash")
    return sites.Site(folder, {})


@clause("V13")
@rejects("V13")
@pytest.mark.parametrize(
    ("file", "old", "new", "changes"),
    [
        ("train.py", "import", "import  ", ["process", "static"]),
        ("new.sh", "", "exit 1\n", ["process", "static"]),
        ("site.toml", "devices = 4", "devices = 8", ["process", "static"]),
        ("site.toml", "never-run", "simulated", ["static"]),  # written after a run, about that run
        ("README.md", "#", "##", ["static"]),
        ("slurm-1.out", "", "printed", []),
        (".venv/bin/python", "", "installed", []),
        ("env/bin/python", "", "installed", []),
        ("env.tar.gz", "", "packed", []),
        ("runs/1/run.jsonl", "", "{}", []),
    ],
)
def test_which_files_make_a_report_one_of_other_files(ash, file, old, new, changes):
    before = {rung: files.of_site(ash, rung) for rung in ("process", "static")}
    path = ash.folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(path.read_text().replace(old, new, 1) if old else new)
    assert [rung for rung in before if files.of_site(ash, rung) != before[rung]] == changes


@clause("V13")
@rejects("V13")
def test_a_session_writes_down_what_it_runs_and_a_login_node_merges_it(tmp_path):
    """jinja2, matplotlib and torch are hidden on the login node. Then the core is edited, and the page reports that."""
    root = make.copy(tmp_path / "copy")
    session = make.start(
        root, 0, "--site", make.SOUND, "--clause", "F1", f"--part={tmp_path}/parts", "conformance/checks/test_static.py"
    )
    assert session.returncode == 0, session.stdout + session.stderr
    reports = root / make.SOUND / "reports"

    def command(before: str, *arguments: str) -> str:
        code = f"import sys; {before}; from conformance.report.__main__ import main; sys.exit(main(sys.argv[1:]))"
        environ = os.environ | dict(PYTHONPATH=f"{root}{os.pathsep}{root}/core/src")
        command = [sys.executable, "-c", code, f"--reports={reports}", *arguments]
        result = subprocess.run(command, cwd=root, env=environ, check=False, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    login_node = "sys.modules |= dict.fromkeys(['jinja2', 'matplotlib', 'torch', 'numpy', 'ddp_core'])"
    assert "✓2" in command(login_node, f"--parts={tmp_path}/parts")
    command("pass")
    assert "✓ 2 pass<br>" in (reports / "CONFORMANCE.md").read_text()
    make.replace(root / "core/src/ddp_core/device.py", "import os\n", "import os\n\n")
    command("pass")
    assert "≠ 2 of other files<br>" in (reports / "CONFORMANCE.md").read_text()


# ---- which reports are believed --------------------------------------------------------------------------------------

NONE, FOUR = dict(cores=2, accelerator=None, accelerators=0), dict(cores=8, accelerator="H200", accelerators=4)
ON_CPU = dict(python="3.11.2", torch="2.13.0+cpu", mpi="MPICH", ddp_core="1.0")
ON_GPU, ON_SLURM = ON_CPU | dict(torch="2.13.0+cu126"), ON_CPU | dict(slurm="22.05.8")
SHAPED = [
    toml | dict(scheduler=scheduler, node=dict(devices=4)) for toml, scheduler in zip(SITES, ("slurm", "pbs"), strict=True)
]


def believable(rung: str, site: str = "ash", /, **others) -> dict:
    """A valid report of this rung with some values changed and a correct digest."""
    how = dict(
        static=dict(world_size=None, backend="none"),
        process=dict(versions=ON_CPU),
        device=dict(backend="nccl", device="cuda", versions=ON_GPU, machine=FOUR),
        cluster=dict(world_size=4, versions=ON_SLURM),
        machine=dict(world_size=8, backend="nccl", device="cuda", versions=ON_GPU, machine=FOUR),
    )[rung]
    curve = dict(site=site, launcher="srun", precision="fp64", losses=GOLDEN)
    curves = [] if rung == "static" else [curve]
    check = checked(site, launcher=None if rung == "static" else "srun", deviation=1e-15, limit=1e-10)
    (one,) = merge.merge([part(rung, checks=[check], curves=curves, **how)], "2026-05-04", "abc1234")
    one |= {name: value for name, value in others.items() if name in one}
    one["checks"][0] |= {name: value for name, value in others.items() if name in one["checks"][0]}
    if "losses" in others:
        one["curves"][0]["losses"] = others["losses"]
    return one | dict(digest=verify.digest(one))


def contradictions(*reports: dict) -> list[str]:
    return verify.contradictions(Evidence([*reports], SHAPED, SPEC, golden.load()["losses"], lambda *_: {}))


@clause("V14")
def test_believable_reports_are_believed():
    rungs = ("static", "process", "device", "cluster", "machine")
    reports = [believable(rung) for rung in rungs] + [believable("process", "birch")]
    assert contradictions(*reports) == []


FIRST, *REST = golden.load()["losses"]
OFF, A_LITTLE_OFF = ([loss.hex() for loss in (FIRST * factor, *REST)] for factor in (1.001, 1 + 1e-12))
EXCUSED = dict(outcome="expected-failure", reason="x", link="x")


@clause("V14")
@rejects("V14")
@pytest.mark.parametrize(
    ("rung", "changed", "words"),
    [
        ("machine", dict(machine=NONE), "accelerators=0, but should be at least 1"),
        ("machine", dict(device="cpu"), "device=cpu, but should be an accelerator"),
        ("machine", dict(versions=ON_CPU), "torch=2.13.0+cpu, but should be a build for accelerators"),
        ("machine", dict(machine=FOUR | dict(accelerators=8)), "accelerators=8, but should be at most 4"),
        ("machine", dict(versions=ON_GPU | dict(slurm="22.05.8")), "slurm=22.05.8, but should be on a virtual cluster only"),
        ("device", dict(machine=NONE), "accelerators=0, but should be at least 1"),
        ("process", dict(rung="device"), "device=cpu, but should be an accelerator"),
        ("device", dict(rung="process"), "device=cuda, but should be cpu"),
        ("process", dict(rung="cluster"), "slurm=none, but should be the version under which the job ran"),
        ("static", dict(rung="process"), "world_sizes=[] and backend=none, but should be of ranks"),
        ("process", dict(rung="static"), "world_sizes=[2] and backend=gloo, but should be none"),
        ("process", dict(versions=dict(torch="2.13.0")), "mpi=none, but should be the library that started the ranks"),
        ("process", dict(versions=dict(mpi="MPICH")), "torch=none, but should be a version"),
        ("process", dict(world_sizes=[4]), "world sizes of checks and curves=[2], but should be among [4]"),
        ("process", dict(date="2999-01-01"), "date=2999-01-01, but should not be in the future"),
        ("process", dict(deviation=1e-3), "passed with a deviation of 0.001, but should be at most 1e-10"),
        ("process", dict(deviation="inf"), "passed with a deviation of inf, but should be at most 1e-10"),
        ("process", dict(outcome="failed"), "failed without a message"),
        ("process", dict(outcome="expected-failure", clauses=["R3"]), "expected failure without reason and link"),
        ("process", EXCUSED, "expected failure of L2, but should be of no clause in D"),
        ("process", dict(losses=OFF), "curve of srun, world size 2, fp64: 1.0e-03 off in 42 steps, and nothing has failed"),
        ("process", dict(losses=OFF[1:]), "off in 41 steps, and nothing has failed"),
    ],
)
def test_a_report_that_contradicts_itself_is_refused(rung, changed, words):
    assert [line for line in contradictions(believable(rung, **changed)) if words in line and line.endswith("(V14)")]


@clause("V14")
@rejects("V14")
@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("birch", dict(rung="cluster", versions=ON_SLURM), "stand-ins for=none, but should name the commands of pbs"),
        ("birch", dict(files=OF_ASH | dict(conformance="f1")), "files of conformance, abc1234={'f0': ["),
        ("ash", dict(rung="cluster", versions=ON_SLURM, files=OF_ASH | dict(site="s1")), "files of ash, abc1234="),
        ("birch", dict(versions=ON_CPU | dict(ddp_core="2.0")), "core of these files, c0={'1.0': ["),
        ("birch", dict(losses=A_LITTLE_OFF), "rung=2 (ash; birch), but should be 1"),
    ],
)
def test_reports_that_contradict_each_other_are_refused(name, changed, words):
    seen = contradictions(believable("process"), believable("process", name, **changed))
    assert [line for line in seen if words in line and line.endswith("(V14)")], seen


@clause("V14")
def test_a_failure_is_no_contradiction():
    failed = believable("process", outcome="failed", message="losses", deviation=1.0, losses=OFF)
    assert contradictions(failed, believable("process", "birch")) == []


@clause("V14")
@rejects("V14")
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"outcome": "failed"', '"outcome": "passed"', "changed after it was written (V14)"),
        ("1e-15", "1e-17", "changed after it was written (V14)"),
        ('"digest": "', '"digest": "0', "changed after it was written (V14)"),
        ('"format": 2', '"format": 1', "format should be 2 (V14)"),
        ('"checks"', '"che', "not JSON"),
    ],
)
def test_a_report_that_was_edited_is_refused(tmp_path, capsys, old, new, words):
    path = merge.write(believable("process", outcome="failed", message="losses"), tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert report.main(["--reports", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "index.html").exists()


@clause("V14")
@rejects("V14")
def test_a_report_in_the_place_of_another_is_refused(tmp_path, capsys):
    path = merge.write(believable("process"), tmp_path)
    path.rename(path.with_name("machine-nccl.json"))
    assert report.main(["--reports", str(tmp_path)]) == 2
    assert "machine-nccl.json: should be ash/process-gloo.json, as it says itself (V14)" in capsys.readouterr().err


# ---- privacy -------------------------------------------------------------------------------------------------------

HOSTILE = [
    "No such file: '/home/ada/secret plans.txt'",
    "open('/Users/Ada Lovelace/x y/run.jsonl') failed",
    "mounted from store:/export/home on //x/y, see file:///var/ada/log.txt:12",
    f"[c10d] no connection from {socket.gethostname()}:29500 ({socket.getfqdn()})",
    "as ada@example.org on ADAHOST and adahost.cluster.example, job of project phys123",
    "SLURM_NODELIST=nid[0001-0004], peers 10.11.12.13 and fe80::1ff:fe23:4567:890a",
    'File "/tmp/pytest-of-ada/pytest-0/train.py", line 3, in ada_main',
    "PATH=/usr/local/ada/bin:/opt/ada:/bin",
    "git: https://x-access:gh0_ada_pat@example.org/r.git refused, by http://ada:pr0xy-word@proxy:3128/",
    "sent ghp_abcdefgh and eyJhbGciOi.abc and creds-of-hers as headers",
]
SECRETS = "ada lovelace phys123 nid 10.11 fe80 export /home tmp usr /var plans.txt' rack_7 gh0_ pr0xy-word ghp_ eyjhbg creds-of"


@pytest.fixture
def ada(monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "ada")
    monkeypatch.setenv("HOME", "/Users/Ada Lovelace")
    monkeypatch.setenv("HOSTNAME", "adahost")
    monkeypatch.setenv("SBATCH_ACCOUNT", "phys123")
    for name, value in dict(GITHUB_PAT="ghp_abcdefgh", session_jwt="eyJhbGciOi.abc", AWS_CREDENTIALS="creds-of-hers").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("https_proxy", "http://ada:pr0xy-word@proxy:3128/")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "nid[0001-0004]")


@clause("V7")
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_report_does_not_say_whose_machine_it_was(ada, tmp_path, text):
    checks = [checked(outcome="failed", message=text, reason=text, case=text, what=text, host="adahost")]
    machine = dict(cores=2, accelerator=f"made by {text}", accelerators=1, host="adahost", rack="rack_7")
    others = dict(machine=machine, versions=dict(mpi=text), environ=dict(USER="ada"))
    (one,) = merge.merge([part(checks=checks, **others)], "2031-05-04")
    written = merge.write(one, tmp_path).read_text().lower()
    assert [word for word in [*SECRETS.split(), socket.gethostname().lower()] if word in written] == []
    assert private.clean(private.clean(text)) == private.clean(text)


@clause("V7")
def test_what_says_nothing_of_anybody_is_left_as_it_is(ada):
    text = "losses=[1.5, 2], but should be 1e-10/2 at ranks 0:1 of 4(x2), see https://example.org/a/b#c [ash, srun] (L2)"
    assert private.clean(text) == text
    assert private.clean(f"{sites.ROOT}/core/src/x.py:12") == "<repository>/core/src/x.py:12"


@clause("V7")
def test_committed_reports_are_clean():
    for path in (report.HERE / "reports").glob("*/*.json"):
        assert private.clean(one := json.loads(path.read_text())) == one, path.name


# ---- written files -------------------------------------------------------------------------------------------------


@clause("V7")
def test_the_table_for_a_terminal():
    text = report.terminal(evidence(("2031-05-04", [part(checks=[PASSED, checked("birch", outcome="failed")])])), False)
    assert text.splitlines()[:4] == ["       L      V", "ash    ✓1 ○1  ○1", "birch  ✗1 ○1  ○1", "core   ·      ○1"]
    assert "\033[31m✗1\033[0m" in report.terminal(evidence(("2031-05-04", [part(checks=[FAILED])])), True)


@clause("V7")
def test_markdown_has_states_rungs_dates_reasons_and_what_is_unverified():
    seen = evidence(("2031-05-04", [part(checks=[EXPECTED, checked("birch", deviation=1e-16, limit=1e-10)])]))
    text = page.markdown(seen)
    assert text.startswith("<!-- Generated by `nox -s report`")
    assert "- **ash**: simulated, never on the machine itself, 2031-05-01, 2 unverified\n" in text
    assert "- **birch**: never run, 2031-05-02, 0 unverified\n" in text
    assert "! 1 expected failure<br>○ 1 not run<br>· 1 untested<br>process<br>2031-05-04" in text
    assert "the launcher miscounts ([link](https://example.org/1))\n" in text
    assert "| T1, fp64: limit 1e-10 | 1.0e-16, 1,000,000 times below | birch, srun, process rung, world size 2 |\n" in text
    assert "\n- **ash**: The module `sap/1.0` exists.\n- **ash**: \\<RCCL\\> opens that file.\n" in text
    assert "- **L3** They stay so.\n" in text
    assert "<li>The module <code>sap/1.0</code> exists.</li><li>&lt;RCCL&gt; opens that file.</li></ul>" in page.render(seen)


@clause("V7")
def test_simulated_never_reads_as_run_on_the_machine():
    """The names of the strongest rung and status appear only where a report or a site claims them."""
    seen = evidence(("2031-05-04", [part(rung, checks=[PASSED]) for rung in ("static", "process", "device", "cluster")]))
    assert seen.cells["ash", "L2"].rung == "cluster"
    rows = [line for line in page.markdown(seen).splitlines() if line.startswith("| **")]
    assert rows and not [line for line in rows if "machine" in line]
    assert seen.status("ash") == "simulated, never on the machine itself, 2031-05-01"


@clause("V7")
def test_rendering_is_deterministic():
    made, spec = [realistic() for _ in range(2)], (report.HERE / "SPEC.md").read_text()
    shuffled = Evidence(made[1].reports[::-1], list(made[1].site_toml.values()), spec, made[1].golden, lambda *_: {})
    assert Evidence(made[0].reports, [], SPEC, [1.0], lambda *_: {}).sites == [*sorted(made[0].sites[:-1]), "core"]
    for render in (page.markdown, page.render):
        assert render(made[0]) == render(shuffled)


@pytest.fixture
def run(tmp_path):
    """Call main() with these parts in a separate folder. Returns its exit code."""

    def run(*parts: dict, date="2026-05-04") -> int:
        folder = tmp_path / "parts"
        folder.mkdir(exist_ok=True)
        for number, one in enumerate(parts):
            (folder / f"{number}.json").write_text(json.dumps(one))
        return report.main(["--parts", str(folder), "--reports", str(tmp_path / "reports"), "--date", date])

    return run


@clause("V7")
def test_the_command_fails_when_a_check_does_or_did_not_run(run, tmp_path, capsys):
    r3 = EXPECTED | dict(clauses=["R3"])
    assert run(part(checks=[PASSED, r3])) == 0
    assert run(part(checks=[PASSED], expected=dict(ash=["L1", "L2"]))) == 1
    assert "checks run=0, but should be at least 1 [ash, process rung, gloo, world size 2] (L1)" in capsys.readouterr().out
    assert run(part(checks=[PASSED, FAILED])) == 1
    assert "failed: losses_are_golden [ash, process rung] (L2): losses=1, but should be 2" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "reports/ash").iterdir()] == ["process-gloo.json"]
    assert report.main(["--reports", str(tmp_path / "reports")]) == 0
    assert sorted(path.name for path in (tmp_path / "reports").iterdir()) == ["CONFORMANCE.md", "ash", "index.html"]


@clause("V7", "V14")
def test_the_command_refuses_what_it_cannot_read_or_believe(run, tmp_path, capsys):
    assert run() == 2
    assert "no part in it, so nothing was checked" in capsys.readouterr().err
    (tmp_path / "parts/half.json").write_text('{"format": 1, "che')
    assert run() == 2
    assert "half.json: not JSON" in capsys.readouterr().err
    (tmp_path / "parts/half.json").write_text('{"format": 2}')
    assert run() == 2
    (tmp_path / "parts/half.json").unlink()
    assert run(part("device", checks=[PASSED])) == 2
    assert "accelerators=0, but should be at least 1 [ash, device, gloo] (V14)" in capsys.readouterr().err
    assert not (tmp_path / "reports").exists()


@clause("V7")
def test_no_color_is_respected(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for wish, colours in (("1", False), ("", True)):
        monkeypatch.setenv("NO_COLOR", wish)
        assert run(part(checks=[PASSED])) == 0
        assert ("\033[" in capsys.readouterr().out) == colours


def stale(folder) -> bool:
    """Whether CONFORMANCE.md differs from the output for the reports beside it."""
    return (folder / "CONFORMANCE.md").read_text() != page.markdown(report.evidence_in(folder / "reports"))


@clause("V7", "V14")
def test_the_committed_table_is_that_of_the_committed_reports():
    assert not stale(report.HERE), "run `nox -s report`"


@clause("V7")
@rejects("V7")
def test_a_stale_table_is_noticed(tmp_path):
    reports = tmp_path / "reports"
    reports.mkdir()
    (tmp_path / "CONFORMANCE.md").write_text(page.markdown(report.evidence_in(reports)))
    assert not stale(tmp_path)
    merge.write(believable("process"), reports)
    assert stale(tmp_path)


@clause("V7")
def test_a_report_names_the_stand_ins():
    checks = [checked(), checked(site="birch")]
    ash, birch = merge.merge([part(rung="cluster", checks=checks, stand_ins=dict(ash="qsub, mpiexec"))], "2031-05-04")
    assert ash["versions"]["stand-ins for"] == "qsub, mpiexec" and "stand-ins for" not in birch["versions"]
    seen = Evidence([ash, birch], SITES, SPEC, golden.load()["losses"], lambda *_: {})
    assert page.render(seen).count("stand-ins for qsub, mpiexec") == 1

"""The report: what it makes of parts, and what it refuses. All sites here are made up; nothing is written into the repository.

python -m pytest conformance/selftest/test_report.py
"""

import datetime
import json
import math
import random
import re
import socket

import pytest

from conformance.golden import make as golden
from conformance.harness.evidence import Evidence, Spec, margin, read
from conformance.report import page, report

clause = pytest.mark.clause

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


def part(rung="process", world_size=2, backend="gloo", expected=None, checks=(), curves=(), **others) -> dict:
    facts = dict(format=1, rung=rung, backend=backend, device="cpu", world_size=world_size, objections=[])
    facts |= dict(versions=dict(python="3.11.2", torch="2.13.0"), machine=dict(cores=2, accelerator=None, accelerators=0))
    return facts | dict(expected=expected or {}, checks=[*checks], curves=[*curves]) | others


def checked(site="ash", clauses="L2", outcome="passed", **others) -> dict:
    facts = dict(site=site, launcher="srun", name="losses_are_golden", case="", clauses=clauses.split(), outcome=outcome)
    return facts | dict(message="", reason="", link="", what=None, deviation=None, limit=None) | others


def evidence(*dated: tuple[str, list[dict]], sites=SITES, spec=SPEC) -> Evidence:
    merged = [one for date, parts in dated for one in report.merge(parts, date, "abc1234")]
    return Evidence(merged, sites, spec, golden.load()["losses"])


def realistic(names: list[str], spec: str) -> Evidence:
    """Sites that have come differently far, over the real spec: what the page should look like."""
    clauses, noise = Spec.read(spec), random.Random(1)
    tested = [name for name in clauses.clauses if name not in clauses.untested]
    of_core, static = {"A1", "A2", "A3", "L8", "L9", "L10"}, {"A4", "F1", "F2", "F3"}
    for_core = [name for name in tested if name in of_core or name[0] == "V"]
    for_site = [name for name in tested if name not in for_core and name not in static]
    trace = golden.load()["losses"]

    def curves(site, sizes, precision, scale):
        for size in sizes:
            losses = [(loss * (1 + scale * noise.gauss(0, 1) * (noise.random() > 0.2))).hex() for loss in trace]
            for launcher in ("srun", "torchrun"):
                yield size, dict(site=site, launcher=launcher, precision=precision, losses=losses)

    parts = []
    for rung, backend, device, sizes, sites in (
        ("static", "none", "cpu", [None], names),
        ("process", "gloo", "cpu", [1, 2, 4], names[:4]),
        ("device", "nccl", "cuda", [1], names[:2]),
        ("cluster", "gloo", "cpu", [8], names[:2]),
        ("machine", "nccl", "cuda", [16], names[:1]),
    ):
        of_rung = {"static": sorted(static), "process": for_site, "device": for_site}.get(rung, ["L2", "S4", "X1", "X2"])
        for size in sizes:
            checks = [checked("core", name, launcher=None, name=f"the_{name}_of_it") for name in for_core * (rung == "static")]
            for site in sites:
                for name in of_rung:
                    worst, limit = {"L2": (noise.uniform(2e-16, 1e-15), 1e-10), "L3": (noise.uniform(5e-7, 2e-6), 1e-5)}.get(
                        name, (0.0, 0) if name in ("L5", "S3") else (None, None)
                    )
                    for launcher in [None] if rung == "static" else ["srun", "torchrun"]:
                        facts = dict(launcher=launcher, name=f"what_{name}_says", deviation=worst, limit=limit, what="losses")
                        checks.append(checked(site, name, **facts))
            drawn = [
                curve
                for site in sites
                for precision, scale in (("fp64", 4e-16), ("fp32", 4e-7))
                for at, curve in curves(site, [size] if size and rung != "cluster" else [], precision, scale)
            ]
            found = dict.fromkeys(sites, of_rung) | ({"core": for_core} if rung == "static" else {})
            parts.append(part(rung, size, backend, found, checks, drawn, device=device))
    for one in parts:
        for check in one["checks"]:
            if check["site"] == names[-2] and check["clauses"] == ["C1"]:
                check |= dict(outcome="failed", message=f"exit codes=[75, 0], but should be all 75 [{names[-2]}] (C1)")
            if check["site"] == names[2] and check["clauses"] == ["R3"]:
                why = "the launcher counts the ranks of a socket, not those of a node, and says so in its manual"
                check |= dict(outcome="expected-failure", reason=why, link="https://example.org/issues/1")
    facts = [
        dict(
            name=name,
            verified=dict(
                status=status,
                date="2031-05-01",
                evidence=f"What was run for {name}: nothing real.",
                unverified=[f"The module `{name}/{number}.0` exists." for number in range(8)],
            ),
        )
        for name, status in zip(names, ("run-on-site", "simulated", "simulated", "simulated", "never-run"), strict=True)
    ]
    return evidence(("2031-05-04", parts), sites=facts, spec=spec)


# ---- parts to reports ----------------------------------------------------------------------------------------------


@clause("V7")
def test_parts_of_a_run_become_one_report_a_site_rung_and_backend(tmp_path):
    parts = [part(world_size=size, checks=[checked(), checked("birch")], expected=dict(ash=["L2"])) for size in (4, 1)]
    parts.append(part("static", None, "none", checks=[checked("core", "V1", launcher=None)]))
    merged = report.merge(parts, "2031-05-04", "abc1234", True)
    assert [(one["site"], one["rung"], one["world_sizes"]) for one in merged] == [
        ("ash", "process", [1, 4]),
        ("birch", "process", [1, 4]),
        ("core", "static", []),
    ]
    assert [check["world_size"] for check in merged[0]["checks"]] == [1, 4]
    assert (merged[0]["date"], merged[0]["commit"], merged[0]["modified"]) == ("2031-05-04", "abc1234", True)
    path = report.write(merged[0], tmp_path)
    assert path == tmp_path / "ash" / "2031-05-04-process-gloo.json"
    assert read([path]) == [merged[0]]


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
    ],
)
def test_parts_that_cannot_be_are_refused(parts, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        report.merge(parts, "2031-05-04")


@clause("V7")
def test_numbers_that_json_does_not_have_are_told(tmp_path):
    (one,) = report.merge([part(checks=[checked(outcome="failed", deviation=math.inf, limit=1e-10)])], "2031-05-04")
    text = report.write(one, tmp_path).read_text()
    assert "Infinity" not in text
    assert [found for _, found, _ in Evidence([one], SITES, SPEC, [1.0]).worst()] == ["not comparable"]


@clause("V7")
def test_an_objection_of_a_session_is_a_failed_check_of_its_clause():
    found = evidence(("2031-05-04", [part(objections=["2 required checks were skipped, but should have run (V1)"])]))
    assert found.cells["core", "V1"].state == "failed"


# ---- cells ---------------------------------------------------------------------------------------------------------

PASSED, FAILED = checked(), checked(outcome="failed", message="losses=1, but should be 2 [ash] (L2)")
TOLD = checked(outcome="expected-failure", reason="the launcher miscounts", link="https://example.org/1")


@clause("V7")
@pytest.mark.parametrize(
    ("dated", "cell"),
    [
        ([("05-04", [part(checks=[PASSED])])], ("pass", "process", "05-04")),
        ([("05-04", [part(checks=[PASSED, FAILED, TOLD])])], ("failed", "process", "05-04")),
        ([("05-04", [part(checks=[PASSED, TOLD])])], ("expected failure", "process", "05-04")),
        ([("05-04", [part(checks=[checked(outcome="skipped")])])], ("not run", "", "")),
        ([("05-04", [part(expected=dict(ash=["L2"]))])], ("not run", "", "")),
        ([], ("not run", "", "")),
        # The newest report of a rung counts, whichever was read first.
        ([("05-04", [part(checks=[PASSED])]), ("05-03", [part(checks=[FAILED])])], ("pass", "process", "05-04")),
        ([("05-03", [part(checks=[PASSED])]), ("05-04", [part(checks=[FAILED])])], ("failed", "process", "05-04")),
        ([("05-03", [part(checks=[FAILED])]), ("05-04", [part(expected=dict(ash=["L2"]))])], ("not run", "", "")),
        # A pass stands on the strongest rung, with the date of that; a failure on any rung is one.
        (
            [("05-02", [part("machine", checks=[PASSED])]), ("05-04", [part(checks=[PASSED])])],
            ("pass", "machine", "05-02"),
        ),
        (
            [("05-02", [part("machine", checks=[PASSED])]), ("05-04", [part(checks=[FAILED])])],
            ("failed", "process", "05-04"),
        ),
        ([("05-04", [part("static", None, checks=[PASSED]), part("device", backend="nccl")])], ("pass", "static", "05-04")),
        # Two backends on one rung are two reports.
        (
            [
                ("05-03", [part("device", backend="gloo", checks=[FAILED])]),
                ("05-04", [part("device", backend="nccl", checks=[PASSED])]),
            ],
            ("failed", "device", "05-03"),
        ),
    ],
)
def test_state_of_a_clause_at_a_site(dated, cell):
    found = evidence(*dated).cells["ash", "L2"]
    assert (found.state, found.rung, found.date) == cell


@clause("V7")
def test_untested_is_not_a_failure_to_run_and_the_core_is_not_asked_what_sites_are():
    found = evidence(("2031-05-04", [part(checks=[PASSED, checked("core", "V1")])]))
    assert {clause: found.cells["ash", clause].state for clause in found.spec.clauses} == dict(
        L1="not run", L2="pass", L3="untested", V1="elsewhere"
    )
    assert [found.cells["core", clause].state for clause in ("L2", "L3", "V1")] == ["elsewhere", "elsewhere", "pass"]


@clause("V7")
def test_a_clause_that_should_have_run_and_has_not_is_told():
    two = part(expected=dict(ash=["L1", "L2"], birch=["L2"]), checks=[PASSED, checked("birch", outcome="skipped")])
    assert report.not_run([two, part(world_size=4, expected=dict(ash=["L2"]), checks=[FAILED])]) == [
        "checks run=0, but should be at least 1 [ash, process rung, gloo, world size 2] (L1)",
        "checks run=0, but should be at least 1 [birch, process rung, gloo, world size 2] (L2)",
    ]


@clause("V7")
def test_checks_that_say_the_same_are_told_once():
    parts = [part(world_size=size, checks=[FAILED, FAILED | dict(launcher="mpiexec")]) for size in (1, 2)]
    ((site, name, text, _),) = evidence(("2031-05-04", parts)).notes("failed")
    assert (site, name) == ("ash", "L2")
    assert text.startswith("losses_are_golden [process rung, mpiexec, srun, world size 1, 2]: losses=1, but should be 2")


@clause("V7")
def test_margins():
    cases = {(9.8e-16, 1e-10): "9.8e-16, 100,000 times below", (2e-5, 1e-5): "2.0e-05, 2.0 times above", (0.0, 0.0): "exact"}
    cases |= {(0.0, 1e-5): "exact", (1e-16, 0.0): "1.0e-16, should be exact", ("inf", 1e-5): "not comparable"}
    assert {pair: margin(dict(deviation=pair[0], limit=pair[1])) for pair in cases} == cases


@clause("V7")
def test_worst_deviation_is_by_tier():
    checks = [checked(deviation=1e-16, limit=1e-10), checked("birch", deviation=1e-15, limit=1e-10)]
    checks += [checked("core", "V1", launcher=None, deviation=3e-6, limit=1e-5)]
    assert evidence(("2031-05-04", [part(checks=checks)])).worst() == [
        ("T1, fp64: limit 1e-10", "1.0e-15, 100,000 times below", "birch, srun, process rung, world size 2"),
        ("core: limit 1e-5", "3.0e-06, 3.3 times below", "core, process rung, world size 2"),
    ]


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
]


@pytest.fixture
def ada(monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "ada")
    monkeypatch.setenv("HOME", "/Users/Ada Lovelace")
    monkeypatch.setenv("HOSTNAME", "adahost")
    monkeypatch.setenv("SBATCH_ACCOUNT", "phys123")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "nid[0001-0004]")


@clause("V7")
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_report_does_not_tell_whose_machine_it_was(ada, tmp_path, text):
    checks = [checked(outcome="failed", message=text, reason=text, case=text, what=text, host="adahost")]
    machine = dict(cores=2, accelerator=f"made by {text}", accelerators=1, host="adahost", rack="rack 7")
    (one,) = report.merge(
        [part(checks=checks, machine=machine, versions=dict(mpi=text), environ=dict(USER="ada"))], "2031-05-04"
    )
    written = report.write(one, tmp_path).read_text()
    secrets = [
        "ada",
        "lovelace",
        "phys123",
        "nid",
        "10.11",
        "fe80",
        "export",
        "/home",
        "tmp",
        "usr",
        "/var",
        "plans.txt'",
        "rack 7",
    ]
    assert [word for word in [*secrets, socket.gethostname().lower()] if word in written.lower()] == []
    assert report.clean(report.clean(text)) == report.clean(text)


@clause("V7")
def test_what_tells_nothing_is_left_as_it_is(ada):
    text = "losses=[1.5, 2], but should be 1e-10/2 at ranks 0:1 of 4(x2), see https://example.org/a/b#c [ash, srun] (L2)"
    assert report.clean(text) == text
    assert report.clean(f"{report.sites.ROOT}/core/src/x.py:12") == "<repository>/core/src/x.py:12"


def strings(facts) -> list[str]:
    if isinstance(facts, dict):
        return [text for value in facts.values() for text in strings(value)]
    return [text for value in facts for text in strings(value)] if isinstance(facts, list) else [facts] * isinstance(facts, str)


@clause("V7")
def test_committed_reports_are_clean():
    for path in (report.HERE / "reports").glob("*/*.json"):
        assert [text for text in strings(json.loads(path.read_text())) if report.clean(text) != text] == [], path.name


# ---- what is written -----------------------------------------------------------------------------------------------


@clause("V7")
def test_the_table_for_a_terminal():
    text = report.terminal(evidence(("2031-05-04", [part(checks=[PASSED, checked("birch", outcome="failed")])])), False)
    assert text.splitlines()[:4] == ["       L      V", "ash    ✓1 ○1  ○1", "birch  ✗1 ○1  ○1", "core   ·      ○1"]
    assert "\033[31m✗1\033[0m" in report.terminal(evidence(("2031-05-04", [part(checks=[FAILED])])), True)


@clause("V7")
def test_markdown_tells_states_rungs_dates_and_reasons():
    text = report.markdown(evidence(("2031-05-04", [part(checks=[TOLD, checked("birch", deviation=1e-16, limit=1e-10)])])))
    assert text.startswith("<!-- Generated by `python -m conformance.report`")
    assert "- **ash**: simulated, never on the machine itself, 2031-05-01, 2 unverified\n" in text
    assert "! 1 expected failure<br>○ 1 not run<br>· 1 untested<br>process<br>2031-05-04" in text
    assert "the launcher miscounts ([link](https://example.org/1))" in text
    assert "| T1, fp64: limit 1e-10 | 1.0e-16, 1,000,000 times below | birch, srun, process rung, world size 2 |" in text
    assert "- **L3** They stay so." in text


@clause("V7")
def test_simulated_never_reads_as_run_on_the_machine():
    """The words for the strongest rung and status stand only where a report or a site says so."""
    parts = [part(rung, checks=[PASSED]) for rung in ("static", "process", "device", "cluster")]
    found = evidence(("2031-05-04", parts))
    assert found.cells["ash", "L2"].rung == "cluster"
    rows = [line for line in report.markdown(found).splitlines() if line.startswith("| **")]
    assert rows
    assert not [line for line in rows if "machine" in line]
    assert found.status("ash") == "simulated, never on the machine itself, 2031-05-01"
    assert found.status("birch") == "never run, 2031-05-02"


@clause("V7")
def test_what_is_unverified_is_told_apart_from_the_status():
    found = evidence(("2031-05-04", [part(checks=[PASSED])]))
    text = report.markdown(found)
    assert (
        "## Unverified\n" in text
        and "\n- **ash**: The module `sap/1.0` exists.\n- **ash**: \\<RCCL\\> opens that file.\n" in text
    )
    assert "- **birch**: never run, 2031-05-02, 0 unverified" in text
    assert "<ul><li>The module <code>sap/1.0</code> exists.</li><li>&lt;RCCL&gt; opens that file.</li></ul>" in page.render(
        found
    )


@clause("V7")
def test_rendering_is_deterministic():
    made = [realistic(["ash", "birch", "cedar", "downy-birch", "elm"], SPEC) for _ in range(2)]
    shuffled = Evidence(made[1].reports[::-1], list(made[1].facts.values()), SPEC, made[1].golden)
    assert Evidence(made[0].reports, [], SPEC, [1.0]).sites == [*sorted(made[0].sites[:-1]), "core"]
    for render in (report.markdown, page.render):
        assert render(made[0]) == render(shuffled)


@pytest.fixture
def run(tmp_path):
    """main with parts, in a folder of its own; its exit code."""

    def run(*parts: dict, date="2031-05-04") -> int:
        folder = tmp_path / "parts"
        folder.mkdir(exist_ok=True)
        for number, one in enumerate(parts):
            (folder / f"{number}.json").write_text(json.dumps(one))
        return report.main(["--parts", str(folder), "--reports", str(tmp_path / "reports"), "--date", date])

    return run


@clause("V7")
def test_the_command_fails_when_a_check_does_or_did_not_run(run, tmp_path, capsys):
    assert run(part(checks=[PASSED, TOLD])) == 0
    assert run(part(checks=[PASSED], expected=dict(ash=["L1", "L2"]))) == 1
    assert "checks run=0, but should be at least 1 [ash, process rung, gloo, world size 2] (L1)" in capsys.readouterr().out
    assert run(part(checks=[PASSED, FAILED])) == 1
    assert "failed: losses_are_golden [ash, process rung] (L2): losses=1, but should be 2" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "reports").iterdir()) == ["CONFORMANCE.md", "ash", "index.html"]
    assert [path.name for path in (tmp_path / "reports/ash").iterdir()] == ["2031-05-04-process-gloo.json"]


@clause("V7")
def test_the_command_refuses_what_it_cannot_read(run, tmp_path, capsys):
    assert run() == 2
    assert "no part in it, so nothing was checked" in capsys.readouterr().err
    (tmp_path / "parts/half.json").write_text('{"format": 1, "che')
    assert run() == 2
    assert "half.json: not JSON" in capsys.readouterr().err
    (tmp_path / "parts/half.json").write_text('{"format": 2}')
    assert run() == 2
    assert not (tmp_path / "reports").exists()


@clause("V7")
def test_no_color_is_respected(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(part(checks=[PASSED])) == 0
    assert "\033[" not in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "")
    assert run(part(checks=[PASSED])) == 0
    assert "\033[32m" in capsys.readouterr().out


def stale(folder) -> list[str]:
    """Which of the two files are not what the reports beside them render to."""
    found = report.evidence_in(folder / "reports")
    files = {folder / "reports/index.html": page.render(found), folder / "CONFORMANCE.md": report.markdown(found)}
    wanted = any((folder / "reports").glob("*/*.json"))
    return [
        path.name for path, text in files.items() if (path.read_text() if path.exists() else None) != (text if wanted else None)
    ]


@clause("V7")
def test_committed_page_and_table_are_those_of_the_committed_reports():
    assert stale(report.HERE) == [], "run `nox -s report`"


@clause("V7")
@pytest.mark.rejects("V7")
def test_a_stale_page_is_noticed(tmp_path):
    reports = tmp_path / "reports"
    for one in report.merge([part(checks=[PASSED])], "2031-05-04"):
        report.write(one, reports)
    arguments = ["--reports", str(reports), "--markdown", str(tmp_path / "CONFORMANCE.md")]
    assert report.main(arguments) == 0
    assert stale(tmp_path) == []
    for one in report.merge([part(checks=[FAILED])], "2031-05-05"):
        report.write(one, reports)
    assert stale(tmp_path) == ["index.html", "CONFORMANCE.md"]


@clause("V7")
def test_a_report_tells_which_commands_were_stand_ins():
    checks = [checked(), checked(site="birch")]
    ash, birch = report.merge([part(rung="cluster", checks=checks, stand_ins=dict(ash="qsub, mpiexec"))], "2031-05-04")
    assert ash["versions"]["stand-ins for"] == "qsub, mpiexec" and "stand-ins for" not in birch["versions"]
    told = Evidence([ash, birch], SITES, SPEC, golden.load()["losses"])
    assert page.render(told).count("stand-ins for qsub, mpiexec") == 1

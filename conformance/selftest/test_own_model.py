"""The page "Your own model" of sites/README.md, followed word for word by an ordinary user on a virtual cluster.

    python -m pytest conformance/selftest/test_own_model.py --cluster

Needs root and Slurm; `nox -s cluster` runs it. The page names the site to copy. Commands are typed line by line; code is
saved under the page's name for it. Jobs get `--device cpu` in addition, because there is no GPU.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from conformance.cluster import layer
from conformance.cluster.jobs import Job, Odd, Submitter
from conformance.cluster.virtual import UID, USER, VirtualSite
from conformance.harness import sites
from conformance.harness.reference import sha256
from conformance.harness.sites import ROOT, Site

clause, rejects = pytest.mark.clause, pytest.mark.rejects
pytestmark = pytest.mark.timeout(300, method="thread")

TOP = f"/home/{USER}/ddp-sites"  # the user's copy of the repository
BLOCK = re.compile(r"Save this as `(?P<name>[^`]+)`|^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
SLOW = 1.0  # seconds for an fsync; the end of an epoch has four


# ---- the page -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Page:
    text: str

    @property
    def site(self) -> Site:
        return sites.find([re.search(r"^cp -r sites/(\S+) ", self.text, re.MULTILINE)[1]])[0]

    @property
    def blocks(self) -> list[tuple[str, str]]:
        """Pairs in order: ("", commands), or a file's name and its code. Raises ValueError for any other block."""
        blocks, name = [], ""
        for block in BLOCK.finditer(self.text):
            if block["name"]:
                name = block["name"]
            elif block["language"] == "":
                blocks.append(("", block["text"]))
            elif block["language"] == "python" and name:
                blocks.append((name, block["text"]))
            else:
                raise ValueError(f"a block of {block['language']}, and the page does not say what to do with it")
        return blocks

    @property
    def commands(self) -> list[str]:
        return [line for name, text in self.blocks if not name for line in text.splitlines()]

    def of_job(self, number: str) -> tuple[str, str, str]:
        """The page's words for job JOB: its log, its run directory, and the command that stops it."""
        log, folder, stop = (words.replace("JOB", number) for words in re.findall(r"`([^`\n]*JOB[^`\n]*)`", self.text))
        return log, folder, stop

    def says(self, words: str) -> bool:
        return words in " ".join(self.text.split())

    def but(self, old: str, new: str) -> "Page":
        """The page with a mistake in it."""
        assert self.text.count(old) == 1, old
        return Page(self.text.replace(old, new))


PAGE = Page(
    re.search(r"^## Your own model\n(.*?)(?=^## )", (ROOT / "sites/README.md").read_text(), re.MULTILINE | re.DOTALL)[1]
)


class Reader:
    """A user with the repository at TOP on the login node, who follows the page in one shell."""

    def __init__(self, cluster: VirtualSite):
        self.cluster, self.folder = cluster, TOP

    @property
    def here(self) -> Path:
        """The shell's folder, as a path on this machine."""
        return self.cluster.home / Path(self.folder).relative_to(f"/home/{USER}")

    def types(self, line: str) -> CompletedProcess:
        line += " --device cpu" if line.startswith("sbatch ") else ""
        result = self.cluster.on("login", f"{line}\ncode=$?; pwd >~/folder; exit $code", folder=self.folder, timeout=240)
        self.folder = (self.cluster.home / "folder").read_text().strip()
        return result

    def follows(self, blocks: list[tuple[str, str]]) -> dict[str, CompletedProcess]:
        """The result of each command, up to the first that fails."""
        results = {}
        for name, text in blocks:
            if name:
                (self.here / name).write_text(text)
                os.chown(self.here / name, UID, UID)
            for line in [] if name else text.splitlines():
                results[line] = self.types(line)
                if results[line].returncode:
                    return results
        return results

    def submits(self, line: str) -> Job:
        """Submit, and find the job's files where the page says. Raises Odd if the job is refused."""
        result, user = self.types(line), Submitter(self.cluster, PAGE.site, self.folder)
        number = re.search(r"\d+$", result.stdout.strip())
        if result.returncode or not number:
            raise Odd(f"`{line}` was refused: {(result.stderr or result.stdout).strip()}")
        log, folder, _ = PAGE.of_job(number[0])
        return Job(user, number[0], self.here / folder, self.here / log, seen=0)


def failures(followed: dict[str, CompletedProcess]) -> list[str]:
    result = followed.items()
    return [
        f"`{line}`: exit code={of.returncode}, but should be 0: {of.stderr.strip()}" for line, of in result if of.returncode
    ]


# ---- the page followed step by step ---------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def reader(tmp_path_factory, pytestconfig) -> Iterator[Reader]:
    folder, tree = tmp_path_factory.mktemp("cluster"), pytestconfig.getoption("--tree")
    with VirtualSite(PAGE.site, folder, build=layer.build, tree=tree) as cluster:
        cluster.put_site()
        yield Reader(cluster)


@pytest.fixture(scope="session")
def followed(reader) -> dict[str, CompletedProcess]:
    """The results of all commands except the last."""
    *blocks, (_, last) = PAGE.blocks
    assert last.startswith("sbatch ") and last.count("\n") == 1, last
    return reader.follows(blocks)


@pytest.fixture(scope="session")
def job(reader, followed) -> Job:
    """The job of the last command, which runs undisturbed."""
    job = reader.submits(PAGE.commands[-1])
    job.ends()
    return job


@clause("V12")
def test_every_command_succeeds(check, followed):
    check.holds(*failures(followed))
    check.equal(commands=([*followed], PAGE.commands[:-1]))
    tried, shown, used = [*followed.values()][-3:]  # the training by hand, --help, and the use of the weights
    notes = [line for line in tried.stdout.splitlines() if line.startswith("note=") and "--reduction canonical" in line]
    check.equal(notes_that_name_canonical=(len(notes), 1), on_the_page=(PAGE.says("`note=`"), True))
    check.equal(a_prediction=(bool(re.fullmatch(r"label \d predicted \d", used.stdout.strip())), True))
    own = re.findall(r'add\("(--[\w-]+)"', "".join(text for name, text in PAGE.blocks if name))
    check.equal(own_flags_in_the_help=([flag for flag in own if flag in shown.stdout], own), has_own_flags=(bool(own), True))
    check.equal(own_flags_on_the_page=([flag for flag in own if PAGE.says(f"`{flag}`")], own))


@clause("V12")
def test_its_job_trains(check, job):
    """All ranks train every epoch, the losses fall, and nearly all held-out rows are right in the end."""
    code, run, settings = job.code(), job.run(), PAGE.site.toml["job"]
    check.equal(exit_code=(f"{code}: {job.last_words()}" if code else 0, 0))
    losses, epochs = run.values("epoch", "loss"), int(re.search(r"--epochs (\d+)", PAGE.commands[-1])[1])
    check.equal(epochs=(len(losses), epochs), losses=(losses, sorted(losses, reverse=True)))
    check.equal(ranks=(len(job.starts()[0]["ranks"]), settings["nodes"] * settings["ranks_per_node"]))
    right = run.values("epoch", "eval_accuracy")[-1]
    check.equal(more_than_nine_tenths=(right > 0.9, PAGE.says("more than nine tenths of the held-out rows are right")))


@clause("V12")
def test_a_stopped_job_has_the_losses_of_one_that_was_never_stopped(check, job, reader):
    """The page's command stops it within an epoch. Rows, shifts and dropout then resume at that step."""
    reader.cluster.slow_disk(SLOW)
    try:
        # Ranks exchange signals once a second, at saves, and at epoch ends; an epoch takes less than a second.
        other = reader.submits(PAGE.commands[-1] + " --save-steps 7")
        other.trains()
        other.until(lambda: other.run().of("epoch"), "the end of an epoch")
        stopped = reader.types(PAGE.of_job(other.number)[2])
        reader.cluster.slow_disk(0)
        step, epoch = other.comes_back()["step"], other.run().of("epoch")[0]["step"]
        code = other.ends()
    except Odd as odd:
        check.holds(str(odd))
    finally:
        reader.cluster.slow_disk(0)
    run, never = other.run(), job.run()
    ends = [record for record in run.records if record["kind"] == "end"]
    check.equal(exit_codes=([stopped.returncode, code, *(end["exit_code"] for end in ends)], [0, 0, 75, 0]))
    check.equal(resumes_at_step=(step, ends[0]["step"]), within_an_epoch=(step % epoch > 0, True))
    for kind, name in (("step", "loss_hex"), ("epoch", "loss"), ("epoch", "eval_loss"), ("epoch", "eval_accuracy")):
        check.equal(**{name: (run.values(kind, name), never.values(kind, name))})
    check.equal(snapshot=(sha256(other.folder / "snapshot.safetensors"), sha256(job.folder / "snapshot.safetensors")))
    check.equal(promised=(PAGE.says("are those of a run that was never stopped, bit for bit"), True))


# ---- a page with a mistake ------------------------------------------------------------------------------------------


@rejects("V12")
def test_a_command_with_a_mistake_is_rejected(reader):
    user = Reader(reader.cluster)
    assert user.types("mkdir typo && cp -r core sites typo && cd typo").returncode == 0
    (output,) = failures(user.follows(PAGE.but("\n./install.sh ", "\n./instal.sh ").blocks))
    assert output.startswith("`./instal.sh") and "exit code=127" in output, output


@rejects("V12")
def test_code_whose_loss_is_a_mean_is_rejected(reader, followed):
    user = Reader(reader.cluster)
    assert user.types(f"cp -r {reader.folder} ../mean && cd ../mean").returncode == 0
    (output,) = failures(user.follows(PAGE.but('reduction="sum"', 'reduction="mean"').blocks[1:]))
    assert "exit code=2" in output and "loss() returns a mean over rows" in output, output

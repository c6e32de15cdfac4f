"""The front door: set-up happens once, ends cleanly or not at all, and every refusal is one clear sentence.

Nothing is downloaded: `./run` meets a folder of stand-in programs in which Python answers as a test needs it and
passes all else to the real interpreter, and pip only writes down that it was called.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.__main__ import JOBS, command
from tests.environment import physical_gpus

ROOT = Path(__file__).parents[2]
TOOLS = ("sh", "cat", "cksum", "dirname", "grep", "mkdir", "rm", "sleep", "tail", "cp")
STAND_IN = f"""#!/bin/sh
note() {{ echo "$*" >>calls; }}
case "$*" in
    "-c import sys; print(sys.version.split"*) [ -z "${{OLD_PYTHON:-}}" ] || {{ echo "3.9.2 False"; exit; }} ;;
    "-c import venv, ensurepip") [ -z "${{NO_VENV:-}}" ] || exit 1; exit 0 ;;
    "-m venv "*)
        note "$*"
        [ -z "${{BROKEN_VENV:-}}" ] || {{ echo "Error: no space left on device"; exit 1; }}
        case "$*" in *--clear*) rm -rf .venv ;; esac
        mkdir -p .venv/bin; cp "$0" .venv/bin/python; exit 0 ;;
    "-m pip --version") [ -e .venv/bin/python ]; exit ;;
    "-m pip install "*)
        note "$*"
        sleep "${{PIP_SECONDS:-0}}"
        [ -z "${{PIP_SAYS:-}}" ] || {{ echo "$PIP_SAYS"; exit 1; }}
        exit 0 ;;
    "-m tests --"*) ;;
    "-m tests "*) for each; do echo "[$each]"; done; [ -z "${{SHOW_CALLER:-}}" ] || echo "$MHC_CALLED_FROM"; exit 0 ;;
esac
exec {sys.executable} "$@"
"""


class House:
    """A copy of what `./run` needs, and a PATH that holds only stand-ins and a few plain tools."""

    def __init__(self, root: Path, programs: Path) -> None:
        self.root = root
        self.programs = programs
        for name in ("run", "pyproject.toml"):
            shutil.copy(ROOT / name, root)
        shutil.copytree(ROOT / "constraints", root / "constraints")
        (root / "tests").mkdir()
        for name in ("__init__.py", "__main__.py"):
            shutil.copy(ROOT / "tests" / name, root / "tests")
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None
            (programs / tool).symlink_to(found)
        self.install("python3", STAND_IN)
        self.install("c++", "#!/bin/sh\n")

    def install(self, name: str, text: str) -> None:
        """Put a program of this text on the PATH."""
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """Begin `./run` with `arguments`, with nothing in the environment but PATH and `env`."""
        variables: Mapping[str, str] = {"PATH": str(self.programs), "MHC_SET": "cpu", **env}
        return subprocess.Popen(
            [self.root / "run", *arguments],
            cwd=self.programs,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **env: str) -> tuple[int, str, str]:
        """Exit status, output and error output of `./run` with `arguments`."""
        process = self.start(*arguments, **env)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def calls(self) -> list[str]:
        """What venv and pip were asked for since the last look."""
        noted = self.root / "calls"
        lines = noted.read_text().splitlines() if noted.exists() else []
        noted.unlink(missing_ok=True)
        return [" ".join(line.split()[1:3]) for line in lines]


@pytest.fixture
def house(tmp_path: Path) -> House:
    root, programs = tmp_path / "a house", tmp_path / "programs"
    root.mkdir()
    programs.mkdir()
    return House(root, programs)


def test_the_callers_folder_is_handed_on(house: House) -> None:
    """Catches paths among the arguments that can only be read from the project's folder, to which `run` changes."""
    assert house.run("check", SHOW_CALLER="1")[1].splitlines()[-1] == str(house.programs)


def test_arguments_arrive_as_they_were_given(house: House) -> None:
    """Catches an unquoted `$@`: a case name with a space would become two arguments."""
    status, out, _ = house.run("check", "--case", "two words", "-k", "a or b", "")
    assert (status, out.splitlines()) == (
        0,
        ["[-m]", "[tests]", "[check]", "[--case]", "[two words]", "[-k]", "[a or b]", "[]"],
    )


def test_set_up_happens_once(house: House) -> None:
    """Catches a stamp that is never written or never believed."""
    _, _, said = house.run("check")
    assert said == "run: setting up .venv with the cpu set: a minute or more, once\n"
    assert house.calls() == ["venv --clear", "pip install"]
    _, _, said = house.run("test")
    assert (said, house.calls()) == ("", [])


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints/cpu.txt", "constraints/shared.txt"])
def test_new_requirements_are_installed_into_the_same_environment(house: House, changed: str) -> None:
    """Catches a stamp that does not depend on what is wanted, and a rebuild where an update is enough."""
    house.run("check")
    house.calls()
    with (house.root / changed).open("a") as file:
        file.write("# another requirement\n")
    assert house.run("check")[2] == "run: bringing .venv up to date with the cpu set\n"
    assert house.calls() == ["venv .venv", "pip install"]


@pytest.mark.skipif(bool(physical_gpus()), reason="on a machine with a GPU its own set is taken")
def test_the_static_job_brings_its_compiler_and_the_others_keep_it(house: House) -> None:
    """Catches a lane without nvcc, and jobs that install back and forth between two sets."""
    house.run("check", MHC_SET="")
    assert house.run("static", MHC_SET="")[2] == "run: bringing .venv up to date with the static set\n"
    house.calls()
    _, _, said = house.run("check", MHC_SET="")
    assert (said, house.calls()) == ("", [])


def test_a_set_up_cut_short_is_begun_anew(house: House) -> None:
    """Catches half an environment taken for a whole one; it must not be patched up either."""
    assert house.run("check", PIP_SAYS="connection lost")[0] == 2
    house.calls()
    (house.root / ".venv" / "remains").touch()
    assert house.run("check")[0] == 0
    assert house.calls() == ["venv --clear", "pip install"]
    assert not (house.root / ".venv" / "remains").exists()


def test_two_at_once_set_up_once(house: House) -> None:
    """Catches a missing lock: two pips in one environment corrupt it."""
    started = [house.start("check", PIP_SECONDS="2") for _ in range(3)]
    outputs = [process.communicate(timeout=60) for process in started]
    assert all("[check]" in out for out, _ in outputs)
    assert house.calls() == ["venv --clear", "pip install"]
    assert any("another run is setting up .venv" in err for _, err in outputs)


def test_a_killed_set_up_leaves_no_lock(house: House) -> None:
    """Catches a lock that outlives its holder, which would block every later run."""
    process = house.start("check", PIP_SECONDS="1")
    noted = house.root / "calls"
    while not (noted.exists() and "pip install" in noted.read_text()):
        assert process.poll() is None
    process.kill()
    process.communicate(timeout=60)
    assert house.run("check")[0] == 0
    assert house.calls() == 2 * ["venv --clear", "pip install"]


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"OLD_PYTHON": "1"}, "run: Python 3.11 or newer is needed; python3 is 3.9.2.\n"),
        ({"NO_VENV": "1"}, "has no venv or no ensurepip module: install them (Debian, Ubuntu: apt-get install"),
        ({"BROKEN_VENV": "1"}, "no space left on device\nrun: {python3} could not make the virtual environment .venv."),
        ({"PIP_SAYS": "connection lost"}, "connection lost\nrun: pip could not install the cpu set; the whole log is"),
        (
            {"PIP_SAYS": "ERROR: No matching distribution found for torch==2.13.0+cpu"},
            "run: pip cannot find the CPU build of torch: let it read PyTorch's index of CPU wheels too",
        ),
        ({"MHC_SET": "tpu"}, "run: MHC_SET is tpu; expected one of: cpu-oldest cpu gpu-oldest gpu static \n"),
        ({"MHC_PYTHON": "/no/such/python"}, "run: MHC_PYTHON is /no/such/python, which is no program.\n"),
    ],
)
def test_what_is_missing_is_named(house: House, env: dict[str, str], sentence: str) -> None:
    """Catches a shell error or a traceback where a user needs to know what to install."""
    status, out, err = house.run("check", **env)
    assert (status, out) == (2, "")
    assert sentence.format(python3=house.programs / "python3") in err
    assert "Traceback" not in err


def test_without_python_it_says_so(house: House) -> None:
    """Catches "not found" from the shell as the first thing that a newcomer reads."""
    (house.programs / "python3").unlink()
    for arguments in ((), ("check",)):
        status, out, err = house.run(*arguments)
        assert (status, out) == (2, "")
        assert err == "run: python3 is missing: install Python 3.11 or newer, with its venv module.\n"


def test_a_newer_python_beside_an_old_one_is_found(house: House) -> None:
    """Catches giving up where a distribution's python3 is old and python3.12 is there."""
    house.install("python3.12", STAND_IN)
    house.install("python3", '#!/bin/sh\necho "3.9.2 False"\n')
    assert house.run("check")[0] == 0


def test_without_a_compiler_it_warns_and_goes_on(house: House) -> None:
    """Catches TileLang's kernels going missing without a word about the cause."""
    (house.programs / "c++").unlink()
    status, _, err = house.run("check")
    assert status == 0
    assert "no C++ compiler found: TileLang kernels cannot run on the CPU without one" in err


def test_a_gpu_machine_gets_the_gpu_set(house: House) -> None:
    """Catches CPU builds, or a missing CUDA compiler, on a machine whose GPU should be tested."""
    house.run("check", MHC_SET="gpu")
    assert "-c constraints/gpu.txt" in (house.root / "calls").read_text()
    assert "tilelang[nvcc]" in (house.root / ".venv" / "requirements.txt").read_text()


def test_an_interpreter_of_ones_own_is_used_as_it_is(house: House) -> None:
    """Catches set-up that meddles with an environment which the user prepared."""
    status, out, err = house.run("check", "-x", MHC_PYTHON=str(house.programs / "python3"))
    assert (status, out, err) == (0, "[-m]\n[tests]\n[check]\n[-x]\n", "")
    assert not (house.root / ".venv").exists()


def test_an_interpreter_without_the_packages_is_refused(house: House) -> None:
    """Catches an import error as the answer to a wrong MHC_PYTHON."""
    bare = house.programs / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    status, out, err = house.run("check", MHC_PYTHON=str(bare))
    assert (status, out) == (2, "")
    assert "lacks pytest, pytest-xdist, pytest-timeout, torch" in err


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_alone_it_lists_the_jobs(house: House, arguments: tuple[str, ...]) -> None:
    """Catches a list of jobs that needs an installation, or that a new job is missing from."""
    status, out, err = house.run(*arguments)
    assert (status, err, house.calls()) == (0, "", [])
    assert all(f"{name} " in out and job.summary in out for name, job in JOBS.items())


def test_an_unknown_job_is_refused_before_set_up(house: House) -> None:
    """Catches a minute of installation before a typing error is noticed."""
    sentence = f"run: unknown job 'chek'; expected one of: {', '.join(JOBS)}.\n"
    assert house.run("chek") == (2, "", sentence)
    assert house.calls() == []


@pytest.mark.parametrize(
    ("rest", "parallel"),
    [([], True), (["--op", "collapse"], True), (["-p", "no:cacheprovider"], True), (["-k", "n"], True)]
    + [(own, False) for own in (["-n", "2"], ["-n0"], ["--numprocesses=3"], ["-p", "no:xdist"], ["--pdb"])],
)
def test_the_user_decides_on_parallel_runs(rest: list[str], parallel: bool) -> None:
    """Catches `-n auto` overriding, or colliding with, what the user asked for."""
    line = command(JOBS["check"], rest)
    assert ("auto" in line, line[-len(rest) :] if rest else []) == (parallel, rest)

"""The pytest side of the suite: options, header, the trials to run, verdicts and their table."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fast.backends
from cases.load import CaseError, load_all
from cases.ops import OPS
from cases.schema import Case
from oracle.report import Outcome
from oracle.sp import TP_SIZES
from tests import environment, table
from tests.implementations import Implementation, UsageError, of_backend, of_oracle, of_user
from tests.laws import LAWS, applies

CASES = Path(__file__).parent.parent / "cases"
REQUIRABLE = ("gpu", "triton", "tilelang")
RESULT = "verdict"
DIGESTS = "digests"
CRASHED = re.compile(r"test_case\[(?P<case>[^:\]]+):(?P<backend>[^:\]]+):tp(?P<tp>\d+)\]")


@dataclass(frozen=True)
class Trial:
    """One item of the verdict table: a case on a backend at a tp."""

    case: Case
    backend: str
    tp: int

    @property
    def id(self) -> str:
        return f"{self.case.name}:{self.backend}:tp{self.tp}"


class Session:
    """What one pytest run judges: the chosen cases, backends and tp sizes, settled once at configuration."""

    def __init__(self, config: pytest.Config) -> None:
        self.device = _device(config.getoption("device"))
        if self.device == "cuda" and not torch.cuda.device_count():
            raise UsageError("--device cuda: no CUDA device is visible to this torch")
        self.probed = fast.backends.probe(self.device)
        self.user = _users(config.getoption("impl"))
        self.ops = _chosen(config.getoption("op"), tuple(OPS), "--op")
        self.dump: Path | None = config.getoption("dump")
        self.replay: Path | None = config.getoption("replay")
        self.cases = _chosen_cases(config, self.ops) if self.replay is None else [_replayed(self.replay)]
        self.whole = not (config.getoption("case") or config.getoption("tp") or self.replay)
        self.tps = _chosen(config.getoption("tp"), TP_SIZES, "--tp")
        self.backends = _chosen_backends(config, self.probed, self.user)
        self.required = (
            _chosen(config.getoption("require"), REQUIRABLE, "--require") if config.getoption("require") else ()
        )
        self._check_required()
        if not (any(self.trials()) or any(self.laws())):
            raise UsageError("nothing to judge: no case or law is in all of the --case, --op, --tp and --backend given")

    def trials(self) -> Iterator[Trial]:
        """Every trial that the options select, cases first so that a case's trials stay together."""
        for case in self.cases:
            for backend in self.backends:
                for tp in case.tp:
                    if tp in self.tps and self._judges(backend, case.op):
                        yield Trial(case, backend, tp)

    def laws(self) -> Iterator[tuple[str, str, str]]:
        """Every (law, op, backend) that the options select; none when they name cases or tp sizes."""
        if not self.whole:
            return
        for op, backend, law in itertools.product(self.ops, self.backends, LAWS):
            if applies(law, op) and self._judges(backend, op):
                yield law, op, backend

    def kernels(self) -> Iterator[tuple[str, str]]:
        """Every (op, backend) of the suite's own kernels that the options select; none when they name cases or tp."""
        for op, backend in itertools.product(self.ops if self.whole else (), self.backends):
            if backend in self.probed:
                yield op, backend

    def implementation(self, op: str, backend: str) -> Implementation:
        """The function behind a backend's name; raises `fast.registry.Unsupported` where it has none for the op."""
        if backend == "oracle":
            return of_oracle(op)
        if (backend, op) in self.user:
            return self.user[backend, op]
        return of_backend(op, backend)

    def rerun(self, trial: Trial) -> str:
        """The command that repeats one trial."""
        source = f"--replay {self.replay}" if self.replay else f"--case {trial.case.name}"
        what = f"{source} --tp {trial.tp}"
        own = self.user.get((trial.backend, trial.case.op))
        who = f"--impl {own.request}" if own else f"--backend {trial.backend}"
        return f"./run check {what} {who}" + (" --device cuda" if self.device == "cuda" else "")

    def unavailable(self) -> list[tuple[str, str]]:
        """Backends that this machine does not offer, each with the reason."""
        return [(name, backend.reason) for name, backend in self.probed.items() if not backend.available]

    def _judges(self, backend: str, op: str) -> bool:
        users_backend = any(name == backend for name, _ in self.user)
        return not users_backend or (backend, op) in self.user

    def _check_required(self) -> None:
        for name in self.required:
            if name == "gpu" and self.device != "cuda":
                raise UsageError("--require gpu: this run uses no GPU (none is visible, or --device cpu was given)")
            if name in self.probed and not self.probed[name].available:
                raise UsageError(f"--require {name}: {self.probed[name].reason}")


SESSION = pytest.StashKey[Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mHC oracle suite")
    many: dict[str, Any] = {"action": "append", "default": []}
    group.addoption("--op", metavar="OP", help="judge only this op (may be repeated)", **many)
    group.addoption("--case", metavar="NAME", help="judge only this case (may be repeated)", **many)
    group.addoption("--tp", metavar="N", type=int, help="judge only this tp size (may be repeated)", **many)
    group.addoption("--backend", metavar="NAME", help="judge only this backend (may be repeated)", **many)
    group.addoption(
        "--impl", metavar="OP=PLACE:FUNCTION", help="judge your own function, from FILE.py or a module", **many
    )
    group.addoption("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where kernels run")
    group.addoption("--verdict-json", metavar="FILE", type=Path, help="write versions, counts and digests here")
    group.addoption("--dump", metavar="DIR", type=Path, help="write the inputs of failing trials here")
    group.addoption("--replay", metavar="FILE", type=Path, help="judge the inputs that --dump wrote, and no case")
    group.addoption("--require", metavar="THING", help=f"fail if this is missing: {', '.join(REQUIRABLE)}", **many)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("help", default=False):
        return
    if _device(config.getoption("device")) == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        config.stash[SESSION] = Session(config)
    except (UsageError, CaseError) as error:
        raise pytest.UsageError(str(error)) from None
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """What `-n auto` means where kernels run on GPUs; elsewhere xdist's own choice, by cores."""
    if _device(config.getoption("device")) != "cuda":
        return None
    gpus = environment.visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), environment.physical_gpus())
    return environment.workers_for(environment.cores(), len(gpus), environment.gpu_bytes())


def pytest_report_header(config: pytest.Config) -> list[str]:
    session = config.stash[SESSION]
    lines = [f"mHC oracle suite: {', '.join(f'{k} {v}' for k, v in versions().items())}"]
    lines.append(f"device: {session.device}, tier: {'gpu' if session.device == 'cuda' else 'local'}")
    lines.append(f"backend oracle: PyTorch, on the {'GPU and CPU' if session.device == 'cuda' else 'CPU'}")
    for name, backend in session.probed.items():
        state = f"{backend.version}, {backend.mode}" if backend.available else f"unavailable: {backend.reason}"
        lines.append(f"backend {name}: {state}")
    return lines


def versions() -> dict[str, str]:
    """Versions that may matter for bits: Python, torch, numpy and the DSLs, "missing" where not installed."""
    found = {"python": platform.python_version()}
    for package in ("torch", "numpy", "triton", "tilelang"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    session = metafunc.config.stash[SESSION]
    if "trial" in metafunc.fixturenames:
        trials = [pytest.param(trial, id=trial.id) for trial in session.trials()]
        metafunc.parametrize("trial", trials)
    if "law" in metafunc.fixturenames:
        laws = [pytest.param(*names, id=":".join(names)) for names in session.laws()]
        metafunc.parametrize(("law", "law_op", "law_backend"), laws)
    if {"kernel_op", "kernel_backend"} <= set(metafunc.fixturenames):
        kernels = [pytest.param(*names, id=":".join(names)) for names in session.kernels()]
        metafunc.parametrize(("kernel_op", "kernel_backend"), kernels)


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Where kernels run: "cpu" or "cuda"; workers that share a GPU are each held to a part of its memory."""
    chosen = pytestconfig.stash[SESSION].device
    if chosen == "cuda":
        import torch

        torch.cuda.set_per_process_memory_fraction(environment.share_of_gpu(os.environ))
    return chosen


@pytest.fixture(scope="session")
def session(pytestconfig: pytest.Config) -> Session:
    """What this run judges."""
    return pytestconfig.stash[SESSION]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    subject = _subject(item)
    if call.excinfo is not None and isinstance(call.excinfo.value, Mismatch):
        report.longrepr = str(call.excinfo.value)
    if subject is not None and (report.when == "call" or report.outcome != "passed"):
        outcome, reason = _outcome(report, call)
        raw = {**subject, "outcome": outcome.value, "reason": reason}
        report.user_properties.append((RESULT, raw))
    _fail_required_skip(item, report, subject)
    return report


def _subject(item: pytest.Item) -> dict[str, Any] | None:
    """What a test item judges, as the first fields of a `table.Result`; None for any other test."""
    params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    trial = params.get("trial")
    if isinstance(trial, Trial):
        return {"op": trial.case.op, "case": trial.case.name, "backend": trial.backend, "tp": trial.tp}
    if isinstance(params.get("law"), str):  # pytest's own marker stands there when no law was selected
        return {"op": params["law_op"], "case": params["law"], "backend": params["law_backend"], "tp": 0}
    return None


def _fail_required_skip(item: pytest.Item, report: pytest.TestReport, subject: dict[str, Any] | None) -> None:
    """Under ``--require X`` a skip of X is a failure: a run whose assertions never ran has shown nothing."""
    required = item.config.stash[SESSION].required
    marked = any(item.get_closest_marker(name) for name in required)
    backend = subject is not None and subject["backend"] in required
    if report.skipped and (marked or backend):
        report.outcome = "failed"
        report.longrepr = f"skipped although required: {report.longrepr}"


def _outcome(report: pytest.TestReport, call: pytest.CallInfo[None]) -> tuple[Outcome, str]:
    if report.passed:
        return Outcome.EXACT, ""
    if report.skipped:
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else "skipped"
        return Outcome.SKIPPED, reason.removeprefix("Skipped: ")
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, Mismatch):
        return Outcome.MISMATCH, error.headline
    text = str(error)
    return (Outcome.TIMEOUT if "Timeout" in text and "pytest-timeout" in text else Outcome.ERROR), text.split("\n")[0]


class Mismatch(AssertionError):
    """A verdict that is not exact; the text is the report, ``headline`` its first line."""

    def __init__(self, report: str) -> None:
        super().__init__(report)
        self.headline = report.split("\n")[0]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run whose every verdict is a skip has judged nothing, and must not end like one that has."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or exitstatus != pytest.ExitCode.OK:
        return
    reports = [report for reports in reporter.stats.values() for report in reports]
    found = [_result(report, {}) for report in reports if isinstance(report, pytest.TestReport)]
    results = [result for result in found if result is not None]
    if results and all(result.outcome == Outcome.SKIPPED for result in results):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    ops = {case.name: case.op for case in config.stash[SESSION].cases}
    reports = (report for reports in terminalreporter.stats.values() for report in reports)
    seen = [report for report in reports if isinstance(report, pytest.TestReport)]
    found = (_result(report, ops) for report in seen)
    results = [result for result in found if result is not None]
    target = config.getoption("verdict_json")
    if target is not None:
        _write_verdicts(target, results, seen, config)
    if results:
        terminalreporter.section("verdicts")
        for line in table.render(sorted(results, key=_table_order), config.stash[SESSION].unavailable()):
            terminalreporter.line(line)


def _write_verdicts(
    target: Path, results: list[table.Result], reports: list[pytest.TestReport], config: pytest.Config
) -> None:
    from tests import verdicts

    digests: dict[str, dict[str, dict[str, str]]] = {}
    for report in reports:
        properties = dict(report.user_properties)
        raw, text = properties.get(RESULT), properties.get(DIGESTS)
        if isinstance(raw, dict) and isinstance(text, str):
            digests.setdefault(raw["case"], {})[f"{raw['backend']} tp{raw['tp']}"] = json.loads(text)
    tests = Counter(report.outcome for report in reports if report.when == "call" or report.outcome != "passed")
    device = config.stash[SESSION].device
    written = verdicts.document(results, digests, versions(), device, tests)
    target.write_text(json.dumps(written, indent=1) + "\n")


def _result(report: pytest.TestReport, ops: dict[str, str]) -> table.Result | None:
    """The verdict that a report carries; a worker that died left only the test's id, which says the rest."""
    raw = dict(report.user_properties).get(RESULT)
    if isinstance(raw, dict):
        return table.Result(**{**raw, "outcome": Outcome(raw["outcome"])})
    crashed = CRASHED.search(report.nodeid) if report.failed else None
    if crashed is None or crashed["case"] not in ops:
        return None
    case, reason = crashed["case"], "the process died, or hung and was ended"
    return table.Result(ops[case], case, crashed["backend"], int(crashed["tp"]), Outcome.ERROR, reason)


def _table_order(result: table.Result) -> tuple[int, str, int, str]:
    return list(OPS).index(result.op), result.backend, result.tp, result.case


def _users(requests: list[str]) -> dict[tuple[str, str], Implementation]:
    """The user's functions by (name, op); refuses two that one row of the table could not tell apart."""
    found: dict[tuple[str, str], Implementation] = {}
    for own in map(of_user, requests):
        if (own.name, own.op) in found:
            raise UsageError(f"--impl {own.request}: a function of that name is given for {own.op} already; rename one")
        found[own.name, own.op] = own
    return found


def _device(choice: str) -> str:
    """The device that "auto" means here; CUDA is not started for it."""
    if choice != "auto":
        return choice
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return "cuda" if environment.physical_gpus() and not hidden else "cpu"


def _replayed(path: Path) -> Case:
    """The case of a file that ``--dump`` wrote, its inputs laid by for the judge."""
    from tests import judge, replay

    case, inputs = replay.load(path)
    judge.REPLAYED[case.name] = inputs
    return case


def _chosen_cases(config: pytest.Config, ops: tuple[str, ...]) -> list[Case]:
    cases = load_all(CASES)
    names = _chosen(config.getoption("case"), tuple(case.name for case in cases), "--case")
    return [case for case in cases if case.op in ops and case.name in names]


def _chosen_backends(
    config: pytest.Config, probed: dict[str, Any], user: dict[tuple[str, str], Any]
) -> tuple[str, ...]:
    """The user's own functions beside the backends asked for; with neither, all that this machine offers."""
    own = tuple(dict.fromkeys(name for name, _ in user))
    offered = ("oracle", *(name for name, backend in probed.items() if backend.available))
    asked = config.getoption("backend")
    for name in asked:
        if name in probed and not probed[name].available:
            raise UsageError(f"--backend {name}: unavailable here: {probed[name].reason}")
    if not asked:
        return own or offered
    return tuple(dict.fromkeys((*_chosen(asked, (*offered, *own), "--backend"), *own)))


def _chosen(asked: list[Any], known: tuple[Any, ...], option: str) -> tuple[Any, ...]:
    """The values asked for, or all known ones; one sentence when something asked for is not known."""
    for value in asked:
        if value not in known:
            close = [str(name) for name in known if str(value) in str(name)][:5] if option == "--case" else known
            raise UsageError(f"{option} {value}: unknown, expected one of {', '.join(map(str, close or known[:5]))}")
    return tuple(dict.fromkeys(asked)) or known

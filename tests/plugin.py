"""The pytest side of the suite: options, header, the trials to run, verdicts and their table."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import math
import os
import platform
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fast.backends
from cases.faults import alike
from cases.load import CaseError, from_caller, load_all
from cases.ops import OPS
from cases.schema import Case
from oracle.report import Context, Outcome, failure
from oracle.sp import TP_SIZES
from tests import environment, memory, table
from tests.implementations import Implementation, UsageError, of_backend, of_oracle, of_user
from tests.laws import LAWS, applies
from tests.reports import context_of, explain_error
from tests.subjects import SUBJECTS
from tests.trials import LawTrial, Trial

CASES = Path(__file__).parent.parent / "cases"
LISTED = "those that `./run cases list` shows"
REQUIRABLE = ("gpu", "triton", "tilelang")
NO_CUDA = "no CUDA device is visible to this torch"
UNUSED_GPU = f"this machine has a GPU, but {NO_CUDA}; --device cpu keeps the run off it"
NOTHING_RAN = "nothing was judged: no test is in all that -k, -m, the paths and the other options select"
RESULT = "verdict"
DIGESTS = "digests"


class Session:
    """What one pytest run judges: the chosen cases, backends and tp sizes, settled once at configuration."""

    def __init__(self, config: pytest.Config) -> None:
        asked = config.getoption("device")
        self.device = _device(asked)
        if self.device == "cuda" and not torch.cuda.device_count():
            raise UsageError(f"--device {asked}: {NO_CUDA if asked == 'cuda' else UNUSED_GPU}")
        self.probed = fast.backends.probe(self.device)
        self.user = _users(config.getoption("impl"))
        self.ops = _chosen(config.getoption("op"), tuple(OPS), "--op")
        self.dump: Path | None = config.getoption("dump")
        self.replay: Path | None = config.getoption("replay")
        self.cases = _chosen_cases(config, self.ops) if self.replay is None else [_replayed(self.replay)]
        self.whole = not (config.getoption("case") or config.getoption("tp") or self.replay)
        self.only_laws = bool(config.getoption("law") or config.getoption("subject"))
        self.chosen_laws = _chosen(config.getoption("law"), tuple(LAWS), "--law")
        self.subjects = _chosen(config.getoption("subject"), tuple(SUBJECTS), "--subject")
        self.tps = _chosen(config.getoption("tp"), TP_SIZES, "--tp")
        self.backends = _chosen_backends(config, self.probed, self.user)
        self.required = (
            _chosen(config.getoption("require"), REQUIRABLE, "--require") if config.getoption("require") else ()
        )
        self._check_required()
        if not (any(self.trials()) or any(self.laws())):
            raise UsageError(
                "nothing to judge: no case or law is in all of the "
                "--case, --op, --tp, --law, --subject and --backend given"
            )

    def trials(self) -> Iterator[Trial]:
        """Every trial that the options select, a case's trials together; none when they name laws or their subjects."""
        for case in () if self.only_laws else self.cases:
            for backend in self.backends:
                for tp in case.tp:
                    if tp in self.tps and self._judges(backend, case.op):
                        yield Trial(case, backend, tp)

    def laws(self) -> Iterator[LawTrial]:
        """Every law on every subject that the options select; none when they name cases or tp sizes."""
        subjects = [SUBJECTS[name] for name in self.subjects if SUBJECTS[name].op in self.ops] if self.whole else []
        for subject, backend, law in itertools.product(subjects, self.backends, self.chosen_laws):
            if self._judges(backend, subject.op) and applies(law, subject, **self._out(backend, subject.op)):
                yield LawTrial(law, subject, backend)

    def _out(self, backend: str, op: str) -> dict[str, bool]:
        """How a kernel takes ``out=``, known without loading a kernel language."""
        own = self.user.get((backend, op))
        if own is not None:
            return {"accepts_out": own.accepts_out, "needs_out": own.needs_out}
        return {"accepts_out": backend != "oracle", "needs_out": False}

    def kernels(self) -> Iterator[tuple[str, str]]:
        """Every (op, backend) of the suite's own kernels that the options select; none when they name more."""
        for op, backend in itertools.product(self.ops if self.whole and not self.only_laws else (), self.backends):
            if backend in self.probed:
                yield op, backend

    def implementation(self, op: str, backend: str) -> Implementation:
        """The function behind a backend's name; raises `fast.registry.Unsupported` where it has none for the op."""
        if backend == "oracle":
            return of_oracle(op)
        if (backend, op) in self.user:
            return self.user[backend, op]
        return of_backend(op, backend)

    def rerun(self, trial: Trial | LawTrial) -> str:
        """The command that repeats one trial."""
        own = self.user.get((trial.backend, trial.case.op))
        who = f"--impl {own.request}" if own else f"--backend {trial.backend}"
        source = f"--replay {self.replay}" if self.replay else f"--case {trial.case.name}"
        what = trial.selection if isinstance(trial, LawTrial) else f"{source} --tp {trial.tp}"
        return f"./run check {what} {who}" + (" --device cuda" if self.device == "cuda" else "")

    def context(self, trial: Trial | LawTrial) -> Context:
        """What a report says of one trial before anything of its outcome."""
        return context_of(trial, self.rerun(trial), versions())

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
    group.addoption("--law", metavar="NAME", help="judge only this law, and no case (may be repeated)", **many)
    group.addoption("--subject", metavar="NAME", help="judge laws only on this subject (may be repeated)", **many)
    group.addoption("--backend", metavar="NAME", help="judge only this backend (may be repeated)", **many)
    group.addoption(
        "--impl", metavar="OP=PLACE:FUNCTION", help="judge your own function, from FILE.py or a module", **many
    )
    group.addoption("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where kernels run")
    group.addoption("--verdict-json", metavar="FILE", type=from_caller, help="write versions, counts and digests here")
    group.addoption("--dump", metavar="DIR", type=from_caller, help="write the inputs of failing trials here")
    group.addoption(
        "--replay", metavar="FILE", type=from_caller, help="judge the inputs that --dump wrote, and no case"
    )
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
    config.pluginmanager.register(Watch(config))
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """What `-n auto` means where kernels run on GPUs; elsewhere xdist's own choice, by cores."""
    if _device(config.getoption("device")) != "cuda":
        return None
    return environment.workers_for(environment.cores(), len(_gpus()), environment.gpu_bytes())


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests for which the options select nothing; pytest would count each as one unexplained skip."""
    pointless = [item for item in items if _has_nothing_to_judge(item)]
    items[:] = [item for item in items if item not in pointless]
    config.hook.pytest_deselected(items=pointless)


def _has_nothing_to_judge(item: pytest.Item) -> bool:
    judging = isinstance(item, pytest.Function) and {"trial", "law_trial", "kernel_op"} & set(item.fixturenames)
    return bool(judging) and item.name.endswith("[NOTSET]")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    session = metafunc.config.stash[SESSION]
    if "trial" in metafunc.fixturenames:
        trials = [pytest.param(trial, id=trial.id) for trial in session.trials()]
        metafunc.parametrize("trial", trials)
    if "law_trial" in metafunc.fixturenames:
        laws = [pytest.param(trial, id=trial.id) for trial in session.laws()]
        metafunc.parametrize("law_trial", laws)
    if {"kernel_op", "kernel_backend"} <= set(metafunc.fixturenames):
        kernels = [pytest.param(*names, id=":".join(names)) for names in session.kernels()]
        metafunc.parametrize(("kernel_op", "kernel_backend"), kernels)


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Where kernels run: "cpu" or "cuda"; workers that share a GPU are each held to a part of its memory."""
    chosen = pytestconfig.stash[SESSION].device
    if chosen == "cuda":
        memory.hold_to_share()
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
    trial = _trial(item)
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, Mismatch):
        report.longrepr = str(error)
    if trial is not None and (report.when == "call" or report.outcome != "passed"):
        outcome, reason, cause = _outcome(report, error)
        if error is not None and outcome in (Outcome.ERROR, Outcome.TIMEOUT):
            text = explain_error(item.config.stash[SESSION].context(trial), outcome, error)
            full = item.config.getoption("tbstyle") in ("long", "native")
            report.longrepr = f"{text}\n{report.longrepr}" if full else text
        report.user_properties.append((RESULT, _raw(trial, outcome, reason, cause)))
    _fail_required_skip(item, report)
    return report


def _trial(item: pytest.Item) -> Trial | LawTrial | None:
    """What a test item judges; None for any other test, and where pytest's marker says that nothing was selected."""
    params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    trial = params.get("trial", params.get("law_trial"))
    return trial if isinstance(trial, Trial | LawTrial) else None


def _raw(trial: Trial | LawTrial, outcome: Outcome, reason: str, cause: str) -> dict[str, Any]:
    """A `table.Result` as plain values, which travel between processes."""
    what = {"op": trial.case.op, "case": trial.name, "backend": trial.backend, "tp": trial.tp}
    return {**what, "outcome": outcome.value, "reason": reason, "cause": cause}


def _fail_required_skip(item: pytest.Item, report: pytest.TestReport) -> None:
    """Under ``--require gpu`` a skip of a test that is marked so is a failure; `unmet` sees to what no mark says."""
    required = item.config.stash[SESSION].required
    if report.skipped and any(item.get_closest_marker(name) for name in required):
        report.outcome = "failed"
        report.longrepr = f"skipped although required: {report.longrepr}"


def _outcome(report: pytest.TestReport, error: BaseException | None) -> tuple[Outcome, str, str]:
    """How a trial ended, the reason in a line, and the cause by which failures are counted."""
    if report.passed:
        return Outcome.EXACT, "", ""
    if report.skipped:
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else "skipped"
        return Outcome.SKIPPED, reason.removeprefix("Skipped: "), ""
    if isinstance(error, Mismatch):
        return Outcome.MISMATCH, error.headline, error.cause
    line = str(error).split("\n")[0]
    if "Timeout" in line and "pytest-timeout" in line:
        return Outcome.TIMEOUT, line, "ran into the time limit"
    return Outcome.ERROR, line, f"{type(error).__name__}: {line}"


class Mismatch(AssertionError):
    """A verdict that is not exact; the text is the report, ``headline`` its first line, ``cause`` what many share."""

    def __init__(self, report: str, cause: str) -> None:
        super().__init__(report)
        self.headline = report.split("\n")[0]
        self.cause = cause


class Watch:
    """Sits where tests are handed out, and gives a verdict on a trial whose process is gone: no worker can."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._started: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._started[nodeid] = time.monotonic()

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        session = self._config.stash[SESSION]
        trials: Iterator[Trial | LawTrial] = itertools.chain(session.trials(), session.laws())
        trial = next((one for one in trials if crashitem.endswith(f"[{one.id}]")), None)
        if trial is None:
            return
        hung = time.monotonic() - self._started.get(crashitem, math.inf) >= self._limit()
        outcome = Outcome.TIMEOUT if hung else Outcome.ERROR
        reason = "hung where no signal reaches it, and was ended" if hung else "the process died"
        report.longrepr = failure(session.context(trial), f"{outcome.value}: {reason}")
        report.user_properties.append((RESULT, _raw(trial, outcome, reason, reason)))

    def _limit(self) -> float:
        """Seconds that a trial may take; one that is ended later than that was not ended for another reason."""
        asked = self._config.getoption("timeout", None) or self._config.getini("timeout")
        return float(asked or self._config.getini("faulthandler_timeout") or math.inf)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run whose every verdict is a skip has judged nothing, and must not end like one that has."""
    if session.config.getoption("collectonly") or exitstatus not in (
        pytest.ExitCode.OK,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        return
    reports = _reports(session.config)
    results = _results(reports)
    if results and all(result.outcome == Outcome.SKIPPED for result in results):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
    if reports is not None and unmet(session.config.stash[SESSION].required, results, reports):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def unmet(required: Sequence[str], results: Sequence[table.Result], reports: Sequence[pytest.TestReport]) -> list[str]:
    """What was required and never judged: no verdict of that backend or, for a GPU, none at all and no GPU test run."""
    judged = [result for result in results if result.outcome != Outcome.SKIPPED]
    ran = [one for one in reports if one.when == "call" and not one.skipped]
    on_gpu = bool(judged) or any({"gpu", "more_than_a_gpu"} & set(one.keywords) for one in ran)
    shown = {result.backend for result in judged} | ({"gpu"} if on_gpu else set())
    return [name for name in required if name not in shown]


def _reports(config: pytest.Config) -> list[pytest.TestReport] | None:
    """Every report of the run; None in a worker, which has only its own."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return None
    found = (report for reports in reporter.stats.values() for report in reports)
    return [report for report in found if isinstance(report, pytest.TestReport)]


def _results(reports: Sequence[pytest.TestReport] | None) -> list[table.Result]:
    """The verdicts that reports carry."""
    raw = [dict(report.user_properties).get(RESULT) for report in reports or ()]
    return [table.Result(**{**one, "outcome": Outcome(one["outcome"])}) for one in raw if isinstance(one, dict)]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: Any, exitstatus: int, config: pytest.Config
) -> Generator[None, None, None]:
    """Write the verdicts after all that pytest and its plugins say, so that no list of failures pushes them away."""
    yield
    session, reports = config.stash[SESSION], _reports(config) or []
    results = _results(reports)
    target = config.getoption("verdict_json")
    if target is not None and not hasattr(config, "workerinput"):  # which has a part of the verdicts only
        _write_verdicts(target, results, reports, config)
    missing = [] if config.getoption("collectonly") else unmet(session.required, results, reports)
    if results or missing:
        terminalreporter.section("verdicts")
        lines = table.render(sorted(results, key=_table_order), session.unavailable()) if results else []
        for line in [*lines, *(f"required, but nothing was judged on it: {name}" for name in missing)]:
            terminalreporter.line(line)
    elif exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        terminalreporter.line(NOTHING_RAN)


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
    return "cuda" if _gpus() else "cpu"


def _gpus() -> list[str]:
    """The GPUs that this run may use."""
    return environment.visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), environment.physical_gpus())


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
            near = alike(str(value), map(str, known)) if len(known) > 50 else known
            raise UsageError(f"{option} {value}: unknown, expected one of {', '.join(map(str, near)) or LISTED}")
    return tuple(dict.fromkeys(asked)) or known

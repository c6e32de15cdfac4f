"""The verdicts of a static run, and the files that a nightly row leaves: JSON like other rows', and JUnit XML."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any
from xml.etree import ElementTree

from tests.static.rules import Finding
from tests.static.units import Unit


@dataclass(frozen=True)
class Verdict:
    """What was found in one unit's machine code; nothing when it is as the contract wants it."""

    unit: Unit
    found: tuple[Finding, ...]
    cached: bool

    @property
    def cell(self) -> str:
        """The verdict in a word or a few."""
        return ",".join(dict.fromkeys(finding.kind for finding in self.found)) or "ok"


def document(verdicts: Sequence[Verdict], missing: Mapping[Any, str]) -> dict[str, Any]:
    """The verdicts as plain data, in the schema of `tests.verdicts`; machine code has no digests that runs share."""
    return {
        "schema": 1,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in ("triton", "tilelang")}},
        "machine": platform.machine(),
        "device": "none",
        "counts": dict(Counter("wrong" if one.found else "ok" for one in verdicts)),
        "unavailable": dict(missing),
        "verdicts": [
            {"language": one.unit.language, "kernel": one.unit.name, "arch": one.unit.arch, "findings": _lines(one)}
            for one in verdicts
        ],
        "digests": {},
    }


def junit(verdicts: Sequence[Verdict], missing: Mapping[Any, str]) -> bytes:
    """The verdicts as JUnit XML: a test case for each kernel and architecture, and one skipped for what is missing."""
    wrong = sum(bool(one.found) for one in verdicts)
    counts = {"tests": str(len(verdicts) + len(missing)), "failures": str(wrong), "skipped": str(len(missing))}
    suite = ElementTree.Element("testsuite", {"name": "static", "errors": "0", **counts})
    for one in verdicts:
        name = {"classname": f"static.{one.unit.language}", "name": f"{one.unit.name} sm_{one.unit.arch}"}
        case = ElementTree.SubElement(suite, "testcase", name)
        if one.found:
            ElementTree.SubElement(case, "failure", {"message": one.cell}).text = "\n".join(_lines(one))
    for language, reason in missing.items():
        case = ElementTree.SubElement(suite, "testcase", {"classname": f"static.{language}", "name": "all kernels"})
        ElementTree.SubElement(case, "skipped", {"message": reason})
    root = ElementTree.Element("testsuites")
    root.append(suite)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True))


def _lines(verdict: Verdict) -> list[str]:
    return [f"{finding.kind}: {finding.sentence}" for finding in verdict.found]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"

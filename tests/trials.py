"""The items of the verdict table: what one test judges, as a value that names itself."""

from __future__ import annotations

from dataclasses import dataclass

from cases.schema import Case


@dataclass(frozen=True)
class Trial:
    """A case on a backend at a tp."""

    case: Case
    backend: str
    tp: int

    @property
    def id(self) -> str:
        """The test's id, in brackets behind its name."""
        return f"{self.case.name}:{self.backend}:tp{self.tp}"

    @property
    def name(self) -> str:
        """What is judged, for lists."""
        return self.case.name


@dataclass(frozen=True)
class LawTrial:
    """A law on one of its subjects, and a backend; there is no tp, for a law shards as it likes."""

    law: str
    case: Case
    backend: str
    tp: int = 0

    @property
    def id(self) -> str:
        """The test's id, in brackets behind its name."""
        return f"{self.law}:{self.case.name}:{self.backend}"

    @property
    def name(self) -> str:
        """What is judged, for lists."""
        return f"{self.law} on {self.case.name}"

    @property
    def selection(self) -> str:
        """The options that select it."""
        return f"--law {self.law} --subject {self.case.name}"

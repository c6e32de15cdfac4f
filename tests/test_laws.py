"""Every law on every op of every backend, with no reference: `tests/laws.py` says what each catches.

The matrix: an op and a backend, because each such kernel is code of its own; a law, because each sees another class
of faults; T = 17 tokens, because 2 * 8 + 1 is past two full shards of the largest tp. The shard law tries smaller T
too (all of them on a GPU; 0, 1, 3, 8, 9 and 17 on a CPU), and the token law batches of up to 130.
"""

from __future__ import annotations

import pytest

from fast.registry import Unsupported
from tests.laws import LAWS, subject
from tests.plugin import Mismatch, Session


def test_law(law: str, law_op: str, law_backend: str, session: Session, device: str) -> None:
    """One law on one kernel; kernels that break each law are in `tests/test_laws_power.py`."""
    try:
        implementation = session.implementation(law_op, law_backend)
        breaches = list(LAWS[law](implementation, subject(law_op, tokens=17), device))
    except Unsupported as reason:
        pytest.skip(str(reason))
    if breaches:
        raise Mismatch(f"{law_op} on {law_backend} breaks {law}: " + "\n  ".join(breaches[:8]))

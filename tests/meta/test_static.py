"""The static lane's own tests: it finds what is planted in machine code, and passes what is right.

Text that a compiler printed is judged here without a compiler; whole kernels are compiled, for one architecture, in a
process of their own, since in this one Triton interprets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.static import compiling, nvcc_flags, ptx, records, sass
from tests.static.allowed import ENTRIES, Entry
from tests.static.launches import Call, TileLangLaunch
from tests.static.records import Verdict
from tests.static.rules import Allowed, Facts, Finding, findings
from tests.static.units import BadLaunches, Unit, _named, known

ROOT = Path(__file__).parents[2]
CLEAN = Facts({"LDG.E.128": 4, "FMUL": 8, "FADD": 8}, {"mul.rn.f32": 8, "add.rn.f32": 8}, (), 0, False)
IEEE_DIVISION = """
        /*00d0*/                   MUFU.RCP R0, R6 ;
        /*00e0*/                   MOV R9, R0 ;
        /*0100*/                   FFMA R3, R9, -R6, 1 ;
"""
FAST_DIVISION = """
        /*00d0*/              @!P0 MUFU.RCP R15, R6 ;
        /*00e0*/                   FADD R2, R3, R4 ;
        /*0100*/                   FMUL R15, R22, R15 ;
"""
NAN_MAKER = "        /*0c90*/                   MUFU.RSQ R5, -QNAN  ;\n"
BRANCHED_ROOT = """
        /*0220*/                   MUFU.RSQ R5, R0 ;
        /*0240*/              @!P1 BRA `(.L_x_1) ;
        /*0260*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm20_sqrt_rn_f32_slowpath) ;
        /*0268*/                   MUFU.RCP R5, R5 ;
        /*026c*/                   FFMA R5, R5, -R5, 1 ;
        /*0270*/                   BRA `(.L_x_2) ;
.L_x_1:
        /*0280*/                   FMUL.FTZ R3, R0, R5 ;
.L_x_2:
        /*0290*/                   STG.E desc[UR4][R2.64], R5 ;
        /*02a0*/                   EXIT ;
"""
ONE_IN_A_REGISTER = """
        /*00d0*/                   MUFU.RCP R0, R6 ;
        /*0100*/                   FFMA R3, R0, -R6, R9 ;
"""
BY_A_CONSTANT = """
        /*2770*/                   MUFU.RCP R19, c[0x0][0x1ac] ;
        /*2860*/                   FFMA R20, R19.reuse, -c[0x0][0x1ac], R20 ;
"""
FUSED_FAST_DIVISION = """
        /*00d0*/                   MUFU.RCP R0, R6 ;
        /*0100*/                   FFMA R3, R0, R7, R9 ;
"""
INTEGER_DIVISION = """
        /*0090*/                   I2F.U32.RP R9, UR8 ;
        /*00a0*/                   MUFU.RCP R9, R9 ;
        /*00b0*/                   IADD3 R6, R9, 0xffffffe, RZ ;
        /*00c0*/                   F2I.FTZ.U32.TRUNC.NTZ R7, R6 ;
"""
FAST_DIVISION_BY_AN_INTEGER = """
        /*0090*/                   I2F.U32.RP R9, UR8 ;
        /*00a0*/                   MUFU.RCP R9, R9 ;
        /*00b0*/                   FMUL R6, R9, R5 ;
"""
FLOAT_READ_AS_INTEGER = """
        /*0080*/                   I2F.U32.RP R9, UR8 ;
        /*0090*/                   FADD R9, R3, R4 ;
        /*00a0*/                   MUFU.RCP R9, R9 ;
        /*00b0*/                   IADD3 R6, R9, 0xffffffe, RZ ;
"""
CONSTANTS_AND_HALVES = """
        /*0080*/                   HFMA2 R9, -RZ, RZ, 1.875, 0 ;
        /*0090*/                   HFMA2.MMA R8, -RZ, RZ, 0, 0 ;
        /*00a0*/                   HFMA2 R7, R9, R8, R8 ;
        /*00b0*/                   HFMA2.BF16_V2 R6, -RZ, RZ, R8 ;
"""
LOST_SEED = """
        /*00d0*/                   MUFU.RSQ R5, R6 ;
        /*00e0*/                   MOV R5, R7 ;
        /*00f0*/                   FMUL.FTZ R8, R5, R6 ;
"""


def kinds(facts: Facts, allowed: Allowed) -> list[str]:
    """The kinds of what is found in facts."""
    return [finding.kind for finding in findings(facts, allowed)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (IEEE_DIVISION, []),
        (FAST_DIVISION, ["MUFU.RCP first read by FMUL"]),
        (ONE_IN_A_REGISTER, []),
        (BY_A_CONSTANT, []),
        (FUSED_FAST_DIVISION, ["MUFU.RCP first read by FFMA"]),
        (BRANCHED_ROOT, []),
        (NAN_MAKER, []),
        (LOST_SEED, ["MUFU.RSQ first read by nothing"]),
        (INTEGER_DIVISION, []),
        (FAST_DIVISION_BY_AN_INTEGER, ["MUFU.RCP first read by FMUL"]),
        (FLOAT_READ_AS_INTEGER, ["MUFU.RCP first read by IADD3"]),
    ],
)
def test_seeds_are_told_apart_by_their_first_reader(text: str, expected: list[str]) -> None:
    """Catches a rule that allows every seed, refuses IEEE or integer divisions, or is blind to guards or moves."""
    assert sass.unrefined(sass.instructions(text)) == expected


def test_packed_instructions_count_twice() -> None:
    """Catches a count that sees no FFMA on sm_100, where two of them may be one FFMA2."""
    assert sass.count({"FFMA2": 3, "FFMA.RM": 1, "HFMA2": 9, "FADD2": 1}, "FFMA") == 7


def test_wide_loads_are_global_loads_of_16_bytes_or_more() -> None:
    """Catches stores, shared memory and narrow loads taken for what keeps the memory busy."""
    counted = {"LDG.E.128": 2, "LDG.E.ENL2.256": 1, "LDG.E.64": 5, "STG.E.128": 7, "LDS.128": 9}
    assert sass.wide_loads(counted) == 3


def test_half_floats_that_hold_a_constant_are_no_arithmetic() -> None:
    """Catches an alarm at every kernel with a constant, and fp16 arithmetic taken for one."""
    found = sass.opcodes(sass.instructions(CONSTANTS_AND_HALVES))
    assert sass.foreign(found) == {"HFMA2": 1, "HFMA2.BF16_V2": 1}


@pytest.mark.parametrize(
    "opcode",
    [
        "add.rn.f64", "selp.f64", "ld.global.f64", "cvt.f64.f32", "cvt.rn.f32.f64", "cvt.rn.f16.f32", "cvt.f32.f16",
        "ld.global.f16", "cvt.rz.bf16.f32", "cvt.rz.bf16x2.f32", "cvt.rn.relu.bf16x2.f32", "cvt.rz.f32.s32",
        "cvt.rni.s32.f32", "cvt.rn.satfinite.e4m3x2.f32", "cvt.rna.tf32.f32", "abs.ftz.f32", "setp.lt.ftz.f32",
        "add.rz.f32", "max.ftz.f32", "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16",
        "tcgen05.mma.cta_group::1.kind::i8", "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
    ],
)  # fmt: skip
def test_ptx_that_leaves_fp32_or_rounds_otherwise_is_refused(opcode: str) -> None:
    """Catches a sum in fp64, a value sent through fp16, a truncating store, a flush, a matrix instruction passed."""
    assert ptx.inexact(ptx.arithmetic(f"@%p1 {opcode} %r1, %r2;")) == {opcode: 1}


@pytest.mark.parametrize(
    "opcode",
    [
        "cvt.f32.bf16", "cvt.rn.bf16.f32", "cvt.rn.bf16x2.f32", "cvt.rn.f32.s32", "max.NaN.f32", "setp.gt.and.f32",
        "ld.global.nc.L1::evict_last.v4.f32", "st.shared.v2.f32", "mov.f32", "neg.f32", "selp.f32", "sqrt.rn.f32",
    ],
)  # fmt: skip
def test_ptx_that_is_exact_or_rounds_once_is_allowed(opcode: str) -> None:
    """Catches an alarm at what the contract's own sequences are made of."""
    found = ptx.arithmetic(f"{{ {opcode} %r1, %r2; }}")
    assert (dict(found), ptx.inexact(found)) == ({opcode: 1}, {})


@pytest.mark.parametrize(
    ("opcode", "ordered"),
    [
        ("atom.global.gpu.acq_rel.add.f32", False), ("red.global.add.f32", False), ("atom.shared.cas.b32", False),
        ("red.global.add.noftz.bf16x2", False), ("atom.global.exch.b32", False), ("atom.add.f64", False),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", False),
        ("atom.global.gpu.acq_rel.add.u32", True), ("red.shared::cta.max.s32", True),
    ],
)  # fmt: skip
def test_atomics_of_floats_are_refused(opcode: str, ordered: bool) -> None:
    """Catches sums in the order in which threads come, and an alarm at a counter of integers."""
    found = ptx.arithmetic(f"{opcode} %r1, [%rd1], %r2;")
    assert (ptx.unordered(found), ptx.inexact(found)) == ({} if ordered else {opcode: 1}, {})


def test_only_rounded_fp32_operations_are_exact() -> None:
    """Catches a list of bad opcodes that misses one: flushing, approximate, narrower, or free to be fused."""
    text = "add.rn.f32 %r1; mul.f32 %r2; div.full.f32 %r3; add.rn.ftz.f32 %r4; fma.rn.bf16x2 %r5; cvt.rn.f32.s32 %r6;"
    found = ptx.arithmetic(
        text + " add.s32 %r7; div.rn.f32 %r8; ex2.approx.f32 %r9; fma.rn.f32x2 %rd1; fma.rn.f32.bf16 %r10;"
    )
    assert set(ptx.inexact(found)) == {
        "mul.f32", "div.full.f32", "add.rn.ftz.f32", "fma.rn.bf16x2", "ex2.approx.f32",
    }  # fmt: skip
    assert ptx.fused(found) == 3


def test_requested_fma_are_counted_lane_by_lane() -> None:
    """Catches a count of calls, which is too small where LLVM has made vectors, or one that counts declarations."""
    text = """
      %1 = tail call float @llvm.fma.f32(float %a, float %b, float %c)
      %2 = tail call <8 x float> @llvm.fma.v8f32(<8 x float> %d, <8 x float> %e, <8 x float> %f)
    declare float @llvm.fma.f32(float, float, float) #4
    declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)
    """
    assert ptx.requested(text) == 9


@pytest.mark.parametrize(
    ("changes", "allowed", "expected"),
    [
        ({}, Allowed(wide=4), []),
        ({}, Allowed(wide=5), ["narrow"]),
        ({"opcodes": {"FFMA": 1}}, Allowed(), ["fused"]),
        ({"opcodes": {"FFMA": 1}}, Allowed(division=True), []),
        ({"ptx": {"fma.rn.f32": 9}, "requested": 8}, Allowed(fma=True), ["fused"]),
        ({"ptx": {"fma.rn.f32": 8}, "requested": 8}, Allowed(fma=True), []),
        ({"ptx": {"fma.rn.f32": 8}, "requested": None}, Allowed(fma=True), []),
        ({"fusable": True}, Allowed(fma=True), ["fused"]),
        ({"opcodes": {"MUFU.EX2": 1}}, Allowed(fma=True, division=True), ["approximate"]),
        ({"opcodes": {"HMMA.16816.F32.BF16": 1}}, Allowed(fma=True), ["approximate"]),
        ({"ptx": {"div.rn.f32": 1}}, Allowed(root=True), ["unexpected"]),
        ({"ptx": {"sqrt.rn.f32": 1}}, Allowed(division=True), ["unexpected"]),
        ({"opcodes": {"STL.64": 2}}, Allowed(), ["spill"]),
        ({"opcodes": {"FHFMA.BF16": 1}}, Allowed(), ["fused"]),
        ({"opcodes": {"DFMA": 1}}, Allowed(fma=True), ["approximate"]),
        ({"opcodes": {"F2FP.BF16.F32.PACK_AB": 1, "F2F.BF16.F32": 1}}, Allowed(), []),
        ({"opcodes": {"F2FP.BF16.F32.PACK_AB.RZ": 1}}, Allowed(), ["approximate"]),
        ({"opcodes": {"HADD2.F32": 1}}, Allowed(), ["approximate"]),
        ({"opcodes": {"FMNMX.FTZ": 1}}, Allowed(division=True), ["approximate"]),
        ({"opcodes": {"FMUL.FTZ": 2}, "ptx": {"sqrt.rn.f32": 1}}, Allowed(root=True), []),
        ({"ptx": {"cvt.f64.f32": 1}}, Allowed(fma=True), ["approximate"]),
        ({"ptx": {"atom.global.add.f32": 1}}, Allowed(), ["unordered"]),
        ({"opcodes": {"REDG.E.ADD.F32.FTZ.RN.STRONG.GPU": 1}}, Allowed(), ["unordered"]),
        ({"opcodes": {"REDG.E.ADD.STRONG.GPU": 1}}, Allowed(), []),
    ],
)
def test_each_rule_has_its_finding(changes: dict[str, Any], allowed: Allowed, expected: list[str]) -> None:
    """Catches a rule that was dropped, and one that fires on what the contract allows."""
    assert kinds(replace(CLEAN, **changes), allowed) == expected


def test_facts_survive_the_cache() -> None:
    """Catches a field that is written and not read back, or a file of another shape taken for facts."""
    assert Facts.load(json.loads(json.dumps(CLEAN.dump()))) == CLEAN
    with pytest.raises(KeyError):
        Facts.load({"opcodes": {}})


def test_wide_loads_grow_with_the_streams() -> None:
    """Catches a table that asks the same of one stream and of eight."""
    assert [Entry(per_stream=1, besides=1).allowed("post", n).wide for n in (1, 8)] == [2, 9]
    assert ENTRIES["project_kernel"].allowed("head", 4).wide == 0


def static(*arguments: str, folder: Path) -> dict[str, Any]:
    """The verdicts of `./run static` with `arguments`, for one architecture."""
    target = folder / "verdicts.json"
    command = [
        sys.executable,
        "-m",
        "tests.static",
        "--arch",
        "90",
        "--jobs",
        "2",
        "--verdict-json",
        str(target),
        *arguments,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(target.read_text())
    return found


def words(found: dict[str, Any]) -> dict[str, set[str]]:
    """Kernel name -> the kinds of its findings."""
    return {row["kernel"]: {text.partition(":")[0] for text in row["findings"]} for row in found["verdicts"]}


@pytest.mark.skipif(bool(compiling.unavailable("triton")), reason=compiling.unavailable("triton"))
def test_planted_triton_kernels_are_found(tmp_path: Path) -> None:
    """Catches a lane blind to fusion, approximations, other formats, atomics, a spill, or a kernel it does not know."""
    found = static("--language", "triton", "--kernels", "tests.meta.planted_static", folder=tmp_path)
    assert {name.split("(")[1].split(",")[0]: kinds for name, kinds in words(found).items()} == {
        "collapse unfused": set(),
        "project unfused": set(),
        "collapse fused": {"fused"},
        "project fused": {"fused"},
        "mixes divided": {"approximate"},
        "sinkhorn exponential": {"approximate"},
        "head root": {"approximate"},
        "collapse spilled": {"spill"},
        "expand unheard": {"unknown"},
        "fn_broadcast divided by a count": set(),
        "mean approximately divided": {"approximate"},
        "mean in fp64": {"approximate"},
        "mean through fp16": {"approximate"},
        "mean truncated": {"approximate"},
        "mean by atomics": {"unordered"},
    }


@pytest.mark.skipif(bool(compiling.unavailable("tilelang")), reason=compiling.unavailable("tilelang"))
def test_planted_tilelang_kernels_are_found(tmp_path: Path) -> None:
    """Catches a lane blind to fusion by nvcc where fma is due, to code that a flag alone keeps from it."""
    found = static("--language", "tilelang", "--kernels", "tests.meta.planted_tilelang", folder=tmp_path)
    assert {name.split("project ")[1].split(",")[0]: kinds for name, kinds in words(found).items()} == {
        "flagged": {"fused"},
        "fused": {"fused"},
        "fused where fma is due": {"fused"},
        "told to fuse where fma is due": {"fused"},
        "left to the compiler": set(),
    }


@pytest.mark.parametrize(
    ("options", "before", "after", "apart"),
    [
        (["-O3", "-fmad=false"], "", "", True),
        (["--fmad", "false", "-lineinfo"], "", "", True),
        (["-fmad=false", "--use_fast_math"], "", "", True),
        (["-fmad=false"], "-fmad=true", "-lineinfo", True),
        ([], "", "", False),
        (["--use_fast_math"], "", "", False),
        (["-fmad=false", "--fmad=true"], "", "", False),
        (["-fmad=false"], "", "-lineinfo -fmad true", False),
        (["-fmad=false", "-optf", "more.txt"], "", "", False),
        ([], "-fmad=false", "", True),
    ],
)
def test_contraction_is_what_nvcc_makes_of_all_its_options(
    options: list[str], before: str, after: str, apart: bool
) -> None:
    """Catches a kernel taken for uncontracted by one of its flags, where a later one or a variable says otherwise."""
    environment = {nvcc_flags.BEFORE: before, nvcc_flags.AFTER: after}
    assert nvcc_flags.keep_apart(options, environment) == apart


def test_another_contraction_is_all_that_a_second_build_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a second build that a variable turns into the first, and one that loses its other options."""
    monkeypatch.setenv(nvcc_flags.AFTER, "-lineinfo --fmad true")
    monkeypatch.delenv(nvcc_flags.BEFORE, raising=False)
    assert compiling._with_contraction(["-I/a", "-fmad=true"], "-fmad=false") == (
        ["-I/a", "-fmad=false"],
        {nvcc_flags.AFTER: "-lineinfo"},
    )


def run_static(*arguments: str) -> tuple[int, str]:
    """The exit status of a run on planted Triton kernels, and what it says of a failure."""
    command = [sys.executable, "-m", "tests.static", "--kernels", "tests.meta.planted_static", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if line.startswith("static: ")]
    return done.returncode, "\n".join(said)


def test_a_run_that_judges_nothing_fails() -> None:
    """Catches a mistyped name that is a success, also where languages are required."""
    status, said = run_static("-k", "nosuchkernel")
    assert (status, said.startswith("static: nothing was judged: ")) == (5, True), said
    status, said = run_static("-k", "nosuchkernel", "--require", "triton", "--require", "tilelang")
    assert (status, said) == (2, "static: required, but no kernel of it was judged: tilelang, triton")


@pytest.mark.skipif(bool(compiling.unavailable("triton")), reason=compiling.unavailable("triton"))
def test_a_required_language_that_was_filtered_away_fails() -> None:
    """Catches a row that requires a language, leaves it out and is green, or takes Triton's kernels for TileLang's."""
    status, said = run_static("--arch", "90", "-k", "project unfused", "--require", "tilelang")
    assert (status, said) == (2, "static: required, but no kernel of it was judged: tilelang")
    assert run_static("--arch", "90", "-k", "project unfused", "--require", "triton") == (0, "")


@pytest.mark.parametrize("module", ["tests.meta.no_such_module", "tests.meta.documents"])
def test_a_module_without_launches_gets_a_sentence(module: str) -> None:
    """Catches a traceback for a mistyped module."""
    with pytest.raises(BadLaunches, match=f"--kernels {module}: expected a module with a function launches"):
        known("triton", module)


def make_planted() -> None:
    """A function for launches that nobody compiles."""


def test_launches_of_one_name_do_not_hide_each_other() -> None:
    """Catches a wrong launch that is not judged since a right one has its name."""
    one, other = (TileLangLaunch(make_planted, (size,), Call("mean", 1, 8, 1, ("mine",))) for size in (1, 2))
    with pytest.raises(BadLaunches, match="two launches are named planted n=1"):
        _named([one, other])


HELPER = {
    "triton": """
import triton
import triton.language as tl

FACTOR = 2.0

@triton.jit
def step(a, b):
    return a + b
""",
    "tilelang": """
FACTOR = 2.0

def step(o, a, b):
    return o.add(a, b)
""",
}
KERNEL = {
    "triton": """
import triton
import triton.language as tl
from owed import helper
from tests.static.launches import Call, TritonLaunch

@triton.jit
def sum_kernel(x, out, BLOCK: tl.constexpr):
    h = tl.arange(0, BLOCK)
    tl.store(out + h, helper.step(tl.load(x + h), helper.FACTOR))

def launches():
    types = {"x": "*fp32", "out": "*fp32", "BLOCK": "constexpr"}
    call = [Call("project", 1, 128, 1, (name,)) for name in ("one", "other", "changed")]
    options = [{}, {}, {"enable_fp_fusion": True}]
    return [TritonLaunch(sum_kernel, types, {"BLOCK": 128}, (), 4, *pair) for pair in zip(call, options)]
""",
    "tilelang": """
import tilelang.language as T
from owed.helper import FACTOR, step
from tests.static.launches import Call, TileLangLaunch

def make_fold(o, size):
    @T.prim_func
    def traced(x: T.Tensor((size,), T.float32), out: T.Tensor((size,), T.float32)):
        with T.Kernel(1, threads=128):
            for h in T.Parallel(size):
                out[h] = step(o, x[h], T.float32(FACTOR))
    return traced

def launches():
    call = [Call("project", 1, 128, 1, (name,)) for name in ("one", "other", "changed")]
    options = [{}, {}, {"compile_flags": []}]
    return [TileLangLaunch(make_fold, (128,), *pair) for pair in zip(call, options)]
""",
}
DIGESTS = """
import sys
import tests.static.__main__
from tests.static.units import units
for unit in units(sys.argv[1], "owed.kernels", everything=False, wanted=lambda name, arch: arch == 90):
    print(unit.digest)
"""


def digests(language: str, folder: Path, **variables: str) -> list[str]:
    """The digests of three launches in a package there: two of the same, and one with other options."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), **variables}
    command = [sys.executable, "-c", DIGESTS, language]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("language", "variables"),
    [("triton", {"PTXAS_OPTIONS": "--fmad=true"}), ("tilelang", {"NVCC_APPEND_FLAGS": "-fmad=true"})],
)
def test_a_cached_verdict_is_of_the_same_kernel(language: str, variables: dict[str, str], tmp_path: Path) -> None:
    """Catches a stale verdict: after a change in a helper, in a constant of another module, an option, a variable."""
    if reason := compiling.unavailable(language):
        pytest.skip(reason)
    folder = tmp_path / "owed"
    folder.mkdir()
    (folder / "kernels.py").write_text(KERNEL[language])
    (folder / "helper.py").write_text(HELPER[language])
    one, other, changed = digests(language, tmp_path)
    assert one == other != changed
    assert one not in digests(language, tmp_path, **variables)
    (folder / "helper.py").write_text(HELPER[language].replace("2.0", "3.0"))
    third = digests(language, tmp_path)[0]
    (folder / "helper.py").write_text(HELPER[language].replace("add(a, b)", "mul(a, b)").replace("a + b", "a * b"))
    assert len({one, third, digests(language, tmp_path)[0]}) == 3


def test_a_row_leaves_both_files() -> None:
    """Catches a wrong kernel that is a passed test in JUnit, and a missing compiler that leaves no trace."""
    unit = Unit("triton", "", "collapse n=4 (collapse, T = 7)", "collapse_kernel", "collapse", 4, 90, True, "")
    verdicts = [Verdict(unit, (), False), Verdict(unit, (Finding("spill", "2 accesses to local memory"),), True)]
    missing = {"tilelang": "no CUDA compiler"}
    (suite,) = ElementTree.fromstring(records.junit(verdicts, missing))
    assert suite.attrib == {"name": "static", "errors": "0", "tests": "3", "failures": "1", "skipped": "1"}
    assert [[child.tag for child in case] for case in suite] == [[], ["failure"], ["skipped"]]
    written = records.document(verdicts, missing)
    assert (written["counts"], written["unavailable"]) == ({"ok": 1, "wrong": 1}, missing)
    assert written["verdicts"][1]["findings"] == ["spill: 2 accesses to local memory"]


@pytest.mark.skipif(bool(compiling.unavailable("triton")), reason=compiling.unavailable("triton"))
def test_launches_are_read_as_triton_reads_them() -> None:
    """Catches machine code read of a kernel that no call compiles: another type, constant or alignment."""
    command = [sys.executable, "-m", "tests.meta.specialising"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert int(line.removesuffix(" launches compared")) > 100

"""The arithmetic under every TileLang kernel against the oracle's, and how kernels are compiled, kept and launched.

Run through TileLang's C target where kernels run on the CPU, and on the GPU with `--device cuda`: one source for both,
so the same tests judge both.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fast
import oracle
from oracle import arith, reduce
from tests.oracle import exact, test_fma
from tests.plugin import Session

pytest.importorskip("tilelang")

import tilelang.language as T

from fast.tilelang_kernels import MAX_NORM_HIDDEN, build, numerics
from fast.tilelang_kernels.collapse import make_collapse
from fast.tilelang_kernels.numerics import Numerics, exp, move, round_to, sigmoid
from fast.tilelang_kernels.sweep import SHARED_BYTES, tile_of

COUNT = 1 << 17
F = T.float32
ROOT = Path(__file__).parents[1]
SCALARS: dict[str, Callable[..., Any]] = {
    "fma": lambda o, a, b, c: o.fma(a, b, c),
    "multiply and add": lambda o, a, b, c: o.add(o.mul(a, b), c),
    "there and back": lambda o, a, b, c: o.sub(o.add(a, b), b),  # noqa: ARG005
    "div": lambda o, a, b, c: o.div(a, b),  # noqa: ARG005
    "sqrt": lambda o, a, b, c: o.sqrt(a),  # noqa: ARG005
    "zero plus": lambda o, a, b, c: o.add(o.constant(0.0), a),  # noqa: ARG005
    "zero times": lambda o, a, b, c: o.mul(o.constant(0.0), a),  # noqa: ARG005
    "third": lambda o, a, b, c: o.share(a, 3),  # noqa: ARG005
    "quarter": lambda o, a, b, c: o.share(a, 4),  # noqa: ARG005
    "round": lambda o, a, b, c: o.widen(o.round(a)),  # noqa: ARG005
    "exp": lambda o, a, b, c: exp(o, a),  # noqa: ARG005
    "sigmoid": lambda o, a, b, c: sigmoid(o, a),  # noqa: ARG005
}


class Operators(Numerics):
    """What a kernel written with plain operators and literals computes: TileLang is free to rewrite it."""

    def constant(self, value: float) -> Any:
        return T.float32(value)

    def add(self, a: Any, b: Any) -> Any:
        return a + b

    def sub(self, a: Any, b: Any) -> Any:
        return a - b

    def mul(self, a: Any, b: Any) -> Any:
        return a * b


def make_scalar(o: Numerics, name: str, leaves: type[Numerics] = Numerics) -> Any:
    """Trace a kernel that applies one entry of SCALARS to three columns of fp32 numbers."""
    leaf, function = leaves(o.cuda), SCALARS[name]

    @T.prim_func  # type: ignore[untyped-decorator]
    def scalar(a_p: T.ptr(F), out_p: T.ptr(F), count: T.int32, ar: T.int64, ac: T.int64, ot: T.int64):  # type: ignore[no-untyped-def, valid-type]
        a = o.tensor(a_p, F, (3, count), (ar, ac))
        out = o.tensor(out_p, F, (count,), (ot,))
        with o.kernel(T.ceildiv(count, 128), threads=128) as block:
            for thread in o.threads(128):
                i = block * 128 + thread
                if i < count:
                    row = T.alloc_local((3,), F)
                    row[0] = a[0, i]
                    row[1] = a[1, i]
                    row[2] = a[2, i]
                    out[i] = function(leaf, row[0], row[1], row[2])

    return scalar


def make_widen(o: Numerics) -> Any:
    """Trace a kernel that reads bf16 and writes fp32."""

    @T.prim_func  # type: ignore[untyped-decorator]
    def widen(a_p: T.ptr(o.bf16), out_p: T.ptr(F), count: T.int32, ar: T.int64, orow: T.int64):  # type: ignore[no-untyped-def, valid-type]
        a = o.tensor(a_p, o.bf16, (count,), (ar,))
        out = o.tensor(out_p, F, (count,), (orow,))
        with o.kernel(T.ceildiv(count, 128), threads=128) as block:
            for thread in o.threads(128):
                if block * 128 + thread < count:
                    out[block * 128 + thread] = o.widen(a[block * 128 + thread])

    return widen


def make_narrow(o: Numerics, v: int) -> Any:
    """Trace a kernel that reads fp32 and writes bf16, `v` at a time."""

    @T.prim_func  # type: ignore[untyped-decorator]
    def narrow(a_p: T.ptr(F), out_p: T.ptr(o.bf16), count: T.int32, ar: T.int64, orow: T.int64):  # type: ignore[no-untyped-def, valid-type]
        a = o.tensor(a_p, F, (count,), (ar,), v)
        out = o.tensor(out_p, o.bf16, (count,), (orow,), v)
        with o.kernel(T.ceildiv(count, 128 * v), threads=128) as block:
            for thread in o.threads(128):
                i = (block * 128 + thread) * v
                if i < count:
                    wide = T.alloc_local((v,), F)
                    rounded = T.alloc_local((v,), o.bf16)
                    move(o, v, a, (i,), wide, (0,))
                    round_to(o, v, wide, rounded)
                    move(o, v, rounded, (0,), out, (i,))

    return narrow


def make_tree(o: Numerics) -> Any:
    """Trace a kernel that sums rows of 64 by the tree."""

    @T.prim_func  # type: ignore[untyped-decorator]
    def tree(a_p: T.ptr(F), out_p: T.ptr(F), rows: T.int32, ar: T.int64, ac: T.int64, orow: T.int64):  # type: ignore[no-untyped-def, valid-type]
        a = o.tensor(a_p, F, (rows, 64), (ar, ac))
        out = o.tensor(out_p, F, (rows,), (orow,))
        with o.kernel(T.ceildiv(rows, 128), threads=128) as block:
            for thread in o.threads(128):
                if block * 128 + thread < rows:
                    out[block * 128 + thread] = o.tree_along(a, 64, block * 128 + thread)

    return tree


@pytest.fixture(scope="module")
def place(session: Session) -> str:
    """The device of TileLang's tensors; skips where TileLang cannot run, with the reason."""
    backend = session.probed["tilelang"]
    if not backend.available:
        pytest.skip(backend.reason)
    return backend.device


def applied(name: str, place: str, *arguments: Tensor, leaves: type[Numerics] = Numerics) -> Tensor:
    """Apply one entry of SCALARS to fp32 arguments; missing ones repeat the last."""
    values = torch.stack((*arguments, arguments[-1], arguments[-1])[:3]).to(place)
    out = torch.empty_like(values[0])
    build.run(make_scalar, (name, leaves), [values, out], [out.numel()])
    return out.cpu()


def every_bf16() -> Tensor:
    """All 65,536 bf16 patterns."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def around_every_bf16() -> Tensor:
    """For every bf16 pattern the fp32 number itself, its neighbours, and those around the middle to the next."""
    top = torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0xF000])
    return exact.patterns((top + low).flatten().numpy())


def random_patterns(seed: int) -> Tensor:
    """fp32 numbers of any exponent, NaN, Inf and subnormals with them."""
    return exact.patterns(exact.generator(seed).integers(0, 1 << 32, COUNT))


def test_loads_keep_every_bf16_number(place: str) -> None:
    """Catches a load that flushes subnormals or loses the NaN of a payload."""
    values = every_bf16()
    out = torch.empty(values.shape, device=place)
    build.run(make_widen, (), [values.to(place), out], [values.numel()])
    assert exact.differing(out.cpu(), arith.widen(values)) == 0


@pytest.mark.parametrize("v", [1, 8])
def test_stores_round_to_nearest_even(place: str, v: int) -> None:
    """Catches a truncating store, ties away from zero, flushed subnormals, and NaN that rounds to Inf or to -0.

    Every bf16 neighbour, tie and near-tie there is: truncation differs in half of them. v = 8 is the paired conversion
    of the vectorised kernels.
    """
    values = around_every_bf16()
    out = torch.empty(values.shape, dtype=torch.bfloat16, device=place)
    build.run(make_narrow, (v,), [build.Wide(values.to(place), v), build.Wide(out, v)], [values.numel()])
    assert exact.differing(out.cpu(), arith.round_bf16(values)) == 0
    truncated = arith.from_bits((arith.bits(values) >> 16).to(torch.int16))
    assert exact.differing(truncated, arith.round_bf16(values)) > values.numel() // 4


def test_rounding_in_registers_is_a_store_and_a_load(place: str) -> None:
    """Catches a simplifier, or a compiler, that drops the rounding between two fused ops."""
    values = around_every_bf16()
    assert exact.differing(applied("round", place, values), arith.widen(arith.round_bf16(values))) == 0


@pytest.mark.parametrize("kind", test_fma.KINDS)
def test_fma_rounds_once(place: str, kind: Callable[[np.random.Generator], test_fma.Triples]) -> None:
    """Catches product and sum rounded apart, and double rounding through fp64, on triples made for each."""
    a, b, c = kind(exact.generator(7))
    assert exact.differing(applied("fma", place, a, b, c), arith.fma(a, b, c)) == 0


def test_products_and_sums_stay_apart(place: str) -> None:
    """Catches a compiler that contracts a * b + c: on cancelling triples the fma gives another value nearly always."""
    a, b, c = test_fma.cancelling(exact.generator(7))
    assert exact.differing(applied("multiply and add", place, a, b, c), a * b + c) == 0
    assert exact.differing(arith.fma(a, b, c), a * b + c) > a.numel() // 2


def test_a_sum_is_not_undone(place: str) -> None:
    """Catches (a + b) - b simplified to a; a kernel of plain operators, which TileLang does simplify, must differ."""
    a, b = exact.fp32(exact.generator(12).normal(size=(2, COUNT)))
    expected = (a + b) - b
    assert exact.differing(applied("there and back", place, a, b), expected) == 0
    assert exact.differing(applied("there and back", place, a, b, leaves=Operators), expected) > COUNT // 4


@pytest.mark.parametrize(("name", "lost"), [("zero plus", -0.0), ("zero times", float("nan"))])
def test_zeros_are_not_folded(place: str, name: str, lost: float) -> None:
    """Catches 0 + a simplified to a, which keeps the sign of -0, and 0 * a to 0, which loses a NaN."""
    values = torch.cat([random_patterns(13), torch.tensor([0.0, -0.0, lost])])
    zero = torch.zeros_like(values)
    expected = zero + values if name == "zero plus" else zero * values
    assert exact.differing(applied(name, place, values), expected) == 0
    assert exact.differing(applied(name, place, values, leaves=Operators), expected) > 0


def test_division_is_correctly_rounded(place: str) -> None:
    """Catches approximate division and a product with the rounded reciprocal; subnormal results and specials too."""
    a, b = random_patterns(1), random_patterns(2)
    wide = exact.fp32(exact.generator(3).normal(size=(2, COUNT)))
    for numerator, denominator in ((a, b), (wide[0], wide[1])):
        assert exact.differing(applied("div", place, numerator, denominator), numerator / denominator) == 0
    assert exact.differing(wide[0] * (1 / wide[1]), wide[0] / wide[1]) > COUNT // 10


@pytest.mark.parametrize(("name", "count"), [("third", 3), ("quarter", 4)])
def test_a_mean_is_one_division(place: str, name: str, count: int) -> None:
    """Catches a product with a rounded third, and a quarter that is not exact where the quotient is subnormal."""
    values = torch.cat([random_patterns(14), exact.patterns(np.arange(1 << 12))])
    assert exact.differing(applied(name, place, values), values / torch.tensor(float(count))) == 0
    third = values * torch.tensor(1.0 / 3.0)
    assert exact.differing(third, values / torch.tensor(3.0)) > COUNT // 10


def test_square_root_is_correctly_rounded(place: str) -> None:
    """Catches an approximate root and one taken as x * rsqrt(x)."""
    values = torch.cat([random_patterns(4), random_patterns(5).abs()])
    assert exact.differing(applied("sqrt", place, values), arith.sqrt(values)) == 0


def test_exp_follows_the_oracles_sequence(place: str) -> None:
    """Catches another polynomial, a missing range end, a lost subnormal result, and the machine's own exp.

    Values where exp is neither 0 nor Inf, the ends of that range closely, and any pattern at all.
    """
    random = exact.generator(6)
    inside = exact.fp32(random.uniform(-104.5, 89.5, COUNT))
    ends = torch.cat([exact.fp32(random.uniform(-104, -87, COUNT)), exact.fp32(random.uniform(88.7, 88.8, 1 << 12))])
    values = torch.cat([inside, ends, random_patterns(8)])
    assert exact.differing(applied("exp", place, values), arith.exp(values)) == 0
    assert exact.differing(inside.double().exp().float(), arith.exp(inside)) > COUNT // 100


def test_sigmoid_follows_the_oracles_sequence(place: str) -> None:
    """Catches a sigmoid by another formula: for large negative z it is 1 / (1 + exp(-z)), which overflows to 0."""
    values = torch.cat([exact.fp32(exact.generator(9).normal(size=COUNT, scale=20.0)), random_patterns(10)])
    assert exact.differing(applied("sigmoid", place, values), arith.sigmoid(values)) == 0


@pytest.mark.parametrize(
    "name",
    ["MAGIC", "MAGIC_BITS", "LOG2_E", "LN2_HIGH", "LN2_LOW", "EXP_LOWEST", "EXP_HIGHEST", "EXP_POLYNOMIAL"],
)
def test_exp_has_the_oracles_constants(name: str) -> None:
    """Catches a constant that was changed on one side only, where no sampled value shows it."""
    assert getattr(numerics, name) == getattr(arith, name)


def test_lanes_are_added_by_the_adjacent_pair_tree(place: str) -> None:
    """Catches a serial sum and a distant-pair (shuffle) tree, on lanes whose exponents lie far apart."""
    random = exact.generator(11)
    lanes = exact.fp32(np.ldexp(random.normal(size=(256, 64)), random.integers(-20, 21, (256, 64))))
    out = torch.empty(256, device=place)
    build.run(make_tree, (), [lanes.to(place), out], [256])
    assert exact.differing(out.cpu(), reduce.lane_tree(lanes)) == 0
    assert exact.differing(reduce.index_sum(lanes.unbind(1)), reduce.lane_tree(lanes)) > 100


def test_one_compilation_serves_every_shape_on_the_cpu() -> None:
    """Catches a size that slipped into a key: a local run would then compile anew for every shape of every case."""
    keys = {build.fixed(torch.empty(tokens, n, hidden), n, hidden) for tokens, n, hidden in [(1, 4, 64), (9, 8, 513)]}
    assert keys == {(None, None)}


@dataclass(frozen=True)
class Address:
    """What `vector_of` asks of a CUDA tensor of 2-byte elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    is_cuda: bool = True

    def stride(self, dim: int | None = None) -> Any:
        return self.strides if dim is None else self.strides[dim]

    def element_size(self) -> int:
        return 2

    def data_ptr(self) -> int:
        return self.address


@pytest.mark.parametrize(
    ("shape", "strides", "address", "vector"),
    [
        ((3, 4, 64), (256, 64, 1), 256, 8),
        ((3, 4, 68), (272, 68, 1), 256, 4),
        ((3, 4, 65), (260, 65, 1), 256, 1),
        ((3, 4, 64), (256, 64, 1), 264, 4),
        ((3, 4, 64), (256, 64, 1), 258, 1),
        ((3, 4, 64), (514, 128, 2), 256, 1),
        ((3, 4, 64), (258, 64, 1), 256, 2),
        ((1, 4, 64), (257, 64, 1), 256, 8),
        ((3, 4, 64), (0, 0, 1), 256, 8),
    ],
)
def test_vectors_are_only_as_wide_as_they_are_aligned(
    shape: tuple[int, ...], strides: tuple[int, ...], address: int, vector: int
) -> None:
    """Catches 16-byte loads from a slice that starts, or whose rows start, elsewhere: on a GPU they fault."""
    tensor: Any = Address(shape, strides, address)
    assert build.vector_of(tensor) == vector


@pytest.mark.parametrize("n", range(1, 9))
def test_every_sweep_fits_the_smallest_gpu(n: int) -> None:
    """Catches a tile that asks for more shared memory than a block can have, which only a launch would say."""
    for tokens in (1, 33):
        for rows in (1, n, n * (n + 2), 81, 1000):
            tensor: Any = Address((tokens,), (1,), 0)
            tile = tile_of(tensor, n, rows)
            assert tile.shared_bytes(n) <= SHARED_BYTES
            assert tile.warps <= 32


def test_a_row_that_no_block_can_hold_is_refused() -> None:
    """Catches a norm that would fail at its launch; supports() and the call must agree, and a boundary say so too."""
    hidden, width = torch.zeros(1, MAX_NORM_HIDDEN + 1, dtype=torch.bfloat16), MAX_NORM_HIDDEN + 1
    assert fast.supports("norm", "tilelang", hidden_size=MAX_NORM_HIDDEN)
    assert not fast.supports("norm", "tilelang", hidden_size=width)
    with pytest.raises(fast.Unsupported, match=f"norm: H must be at most {MAX_NORM_HIDDEN}"):
        fast.kernel("norm", "tilelang")(hidden, hidden[0], norm_eps=1e-6)
    weights = torch.zeros(3, width), torch.zeros(3), torch.zeros(3)
    with pytest.raises(fast.Unsupported, match="pre: H must be at most"):
        fast.kernel("pre", "tilelang")(
            hidden.unsqueeze(1), *weights, config=oracle.MhcConfig(hc_mult=1), norm_weight=hidden[0]
        )


FUSED = re.compile(r"\bv?fn?m(add|sub|la)", re.IGNORECASE)


def machine_code(source: str, folder: Path, *flags: str) -> str:
    """The disassembly of a C kernel for a CPU that has fma, with all inlining that could bring a fusion about."""
    import tilelang.env

    (folder / "kernel.cpp").write_text(source)
    wide = ["-mfma"] if os.uname().machine == "x86_64" else []
    command = ["g++", "-std=c++17", "-O3", "-fPIC", "-c", "kernel.cpp", "-o", "kernel.o", *wide, *flags]
    includes = ["-I", str(tilelang.env.TILELANG_TEMPLATE_PATH)]
    subprocess.run([*command, *includes], cwd=folder, check=True, capture_output=True)
    found = subprocess.run(["objdump", "-d", "kernel.o"], cwd=folder, check=True, capture_output=True, text=True)
    return found.stdout


@pytest.mark.skipif(not (shutil.which("g++") and shutil.which("objdump")), reason="needs g++ and objdump")
def test_the_c_compiler_may_not_contract(tmp_path: Path) -> None:
    """Catches a lost -ffp-contract=off: on a CPU whose baseline has fma, arm64 for one, g++ fuses without it."""
    target = build.Target(cuda=False)
    source = build.compiled(make_collapse, target, (None, None, 1)).get_kernel_source()
    flags = target.options()["compile_flags"]
    assert not FUSED.search(machine_code(source, tmp_path, *flags))
    assert FUSED.search(machine_code(source, tmp_path, "-ffp-contract=fast"))


CALL = """
import fast, torch
residual = torch.arange(3 * 4 * 70).reshape(3, 4, 70).remainder(17).bfloat16()
found = fast.kernel("collapse", "tilelang")(residual, torch.arange(12).reshape(3, 4) / 7)
print(found.view(torch.int16).flatten().tolist())
"""


def start(cache: Path, **env: str) -> subprocess.Popen[str]:
    """Start a process that makes one call on the CPU, with a compile cache of its own."""
    environment = {**os.environ, "TILELANG_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": "", **env}
    environment.pop("TILELANG_PRINT_ON_COMPILATION", None)
    return subprocess.Popen(
        [sys.executable, "-c", CALL],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def published(cache: Path) -> list[Path]:
    """The files that a process may load from the cache: all but those being staged."""
    return [file for file in cache.rglob("*") if file.is_file() and ".staging" not in file.parts]


def seen_to_grow(cache: Path, writing: Callable[[], bool]) -> set[str]:
    """The published files that had more than one size while ``writing``: who loads such a one may get half of it."""
    sizes: dict[Path, set[int]] = collections.defaultdict(set)
    while writing():
        time.sleep(0.001)
        for file in published(cache):
            with contextlib.suppress(FileNotFoundError):
                sizes[file].add(file.stat().st_size)
    return {file.name for file, seen in sizes.items() if len(seen) > 1}


def test_cold_processes_share_a_cache(tmp_path: Path) -> None:
    """Catches a race in the compile cache: a library loaded before it is whole, or another process's kernel.

    Also compiler chatter in a user's output.
    """
    processes = [start(tmp_path) for _ in range(2)]
    grown = seen_to_grow(tmp_path, lambda: any(process.poll() is None for process in processes))
    residual = torch.arange(3 * 4 * 70).reshape(3, 4, 70).remainder(17).bfloat16()
    expected = oracle.collapse(residual, torch.arange(12).reshape(3, 4) / 7).view(torch.int16).flatten().tolist()
    assert [process.communicate(timeout=240) for process in processes] == [(f"{expected}\n", "")] * 2
    assert not grown
    assert len([file for file in published(tmp_path) if file.suffix == ".so"]) == 1


def test_a_library_published_before_it_is_whole_is_seen(tmp_path: Path) -> None:
    """Catches a watch that sees nothing: a library written where others load it must show."""
    parts = iter([b"half", b"of", b"it"])

    def write_on() -> bool:
        part = next(parts, None)
        with (tmp_path / "kernel.so").open("ab") as library:
            library.write(part or b"")
        return part is not None

    assert seen_to_grow(tmp_path, write_on) == {"kernel.so"}


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    """Catches an assertion or a traceback of TileLang's where one sentence would do."""
    process = start(tmp_path, PATH="", CXX="", CC="")
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert "RuntimeError: tilelang cannot compile kernels here: no C++ compiler" in errors.strip().splitlines()[-1]

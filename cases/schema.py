"""The closed model of a case file: every key is checked, an unknown one is an error.

`Case` says what a file may hold; `json_schema()` says the same to editors, and schema.json is its output.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import date
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from cases.flags import glossary
from cases.ops import ANY_ROWS, BF16, ENTRY_OPS, OPS, Argument, Op

SCHEMA_VERSION = 1
CONTRACT = 1
MAX_STREAMS = 8
MAX_TOKENS, MAX_HIDDEN, MAX_ROWS, MAX_ITERS = 2**20, 2**16, 2**16, 10_000
MAX_ELEMENTS = 2**32
"""The most that one argument may hold: 8 GiB of BF16, past every 32-bit offset. Most mistyped sizes are larger."""
KEBAB = r"^[a-z0-9]+(-[a-z0-9]+)*$"
SOURCE = r"^((design|upstream|claims):[0-9A-Z]+(\.[0-9]+)*|https://[^\s]+ [0-9]{4}-[0-9]{2}-[0-9]{2})$"
SHA256 = r"^[0-9a-f]{64}$"
HEX_BITS = r"^([0-9a-f]{4}|[0-9a-f]{8})$"

PadFill = Literal["zero", "nan", "inf", "huge"]
Order = Literal["op-then-gather", "gather-then-op"]
Ranks = Literal[1, 2, 4, 8]
Layout = Literal["contiguous", "columns", "transposed", "gapped", "offset", "far"]
Special = Literal["zero", "subnormal", "inf", "nan", "largest"]
Bits = Annotated[str, Field(pattern=HEX_BITS)]
Recipe = Literal[
    "normal",
    "cancelling",
    "absorbing",
    "opposing",
    "near_tie",
    "mean_tie",
    "wide",
    "integer",
    "one_hot",
    "token_id",
    "special",
    "zeros",
    "ones",
    "constant",
    "bits",
    "file",
]

_SHARED = {"hc_pre_eps": 1e-6, "hc_sinkhorn_eps": 1e-6, "post_mult": 2.0, "sinkhorn_iters": 20}
PRESETS: dict[str, dict[str, float]] = {
    "v4": {"rms_eps": 1e-6, "norm_eps": 1e-6, **_SHARED},
    "v41": {"rms_eps": 1e-20, "norm_eps": 1e-20, **_SHARED},
}
"""Constants of the released models; a copy, so that a case means the same whatever the oracle's presets say."""

ALL_FILLS: tuple[PadFill, ...] = ("zero", "nan", "inf", "huge")


def _one_of(section: str) -> AfterValidator:
    """A check that a word is in one glossary section."""

    def known(word: str) -> str:
        if word not in glossary(section):
            raise ValueError(f"expected a word of [{section}] in flags.toml, got {word!r}")
        return word

    return AfterValidator(known)


def _enum(words: Iterable[str]) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "enum": list(words)})


def _known_op(name: str) -> str:
    if name not in OPS:
        raise ValueError(f"expected one of {', '.join(OPS)}, got {name!r}")
    return name


OpName = Annotated[str, AfterValidator(_known_op), _enum(OPS)]
Flag = Annotated[str, _one_of("flags"), _enum(glossary("flags"))]
WrongKernel = Annotated[str, _one_of("catches"), _enum(glossary("catches"))]
Stage = Annotated[str, _one_of("stages"), _enum(glossary("stages"))]
Constant = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Iters = Annotated[int, Field(ge=1, le=MAX_ITERS)]
ARRAY = Field(strict=False)
"""A TOML array fills a tuple; only the container is converted, its items stay strict."""
FILLED = Field(strict=False, min_length=1)
Shown = dict[Stage, Annotated[tuple[str, ...], FILLED]]
"""For each stage, the outputs that differ when that stage alone is wrong."""


class Closed(BaseModel):
    """Base of every part of a case: no unknown key, no silent conversion, no change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants")


class Patch(Closed):
    """One place of a tensor set by hand: `index` may be short, and then names a whole row or block."""

    index: Annotated[tuple[int, ...], ARRAY]
    value: float | None = None
    bits: Bits | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.value is None) == (self.bits is None):
            raise ValueError("expected either value or bits in a patch, got both or neither")
        return self


class ArgumentInput(Closed):
    """How the values of one argument are made, and how they lie in memory."""

    recipe: Recipe = "normal"
    layout: Layout = "contiguous"
    value: float | None = Field(None, description="the value of recipe 'constant'")
    bits: Annotated[tuple[Bits, ...], ARRAY] = Field((), description="every bit pattern, for recipe 'bits'")
    file: str | None = Field(None, description="a safetensors file in cases/data, for recipe 'file'")
    key: str | None = Field(None, description="the tensor's key in that file")
    kinds: Annotated[tuple[Special, ...], ARRAY] = Field((), description="what recipe 'special' sprinkles; empty: all")
    every: int = Field(8, ge=1, le=MAX_ELEMENTS, description="recipe 'special' replaces one element in so many")
    scale: float = Field(
        1.0, allow_inf_nan=False, description="multiplies the values before they are rounded to the dtype"
    )
    repeat: bool = Field(False, description="every token carries the values of token 0")
    set: Annotated[tuple[Patch, ...], ARRAY] = ()

    @model_validator(mode="after")
    def _recipe_has_its_keys(self) -> Self:
        _only_with(self, "constant", value=self.value is not None)
        _only_with(self, "bits", bits=bool(self.bits))
        _only_with(self, "file", file=self.file is not None, key=self.key is not None)
        if self.recipe != "special" and (self.kinds or self.every != 8):
            raise ValueError(f"expected kinds and every only with recipe 'special', got {self.recipe!r}")
        return self


def _only_with(made: ArgumentInput, recipe: str, **present: bool) -> None:
    """Refuse keys that belong to another recipe, and a recipe without its keys."""
    for key, given in present.items():
        if given and made.recipe != recipe:
            raise ValueError(f"expected {key} only with recipe {recipe!r}, got recipe {made.recipe!r}")
        if not given and made.recipe == recipe:
            raise ValueError(f"expected {key} with recipe {recipe!r}, got none")


class CaseInputs(Closed):
    """The recipe of all arguments, and a table for each that differs.

    An optional argument is passed to the op when, and only when, it has a table here.
    """

    seed: str | None = Field(None, description="replaces the case name as the seed")
    default: ArgumentInput = ArgumentInput()
    arguments: dict[str, ArgumentInput] = {}


class Params(Closed):
    """Plain numbers of ops that take no config."""

    numel: int | None = Field(None, ge=1, le=MAX_ELEMENTS)
    rms_eps: Constant | None = None
    norm_eps: Constant | None = None
    squares_of: Literal["rounded", "unrounded"] | None = None
    sinkhorn_iters: Iters | None = None
    sinkhorn_eps: Constant | None = None
    capture_aux: bool | None = None


class Config(Closed):
    """A preset of the model's constants, and those that this case overrides."""

    preset: Literal["v4", "v41"]
    rms_eps: Constant | None = None
    norm_eps: Constant | None = None
    hc_pre_eps: Constant | None = None
    hc_sinkhorn_eps: Constant | None = None
    post_mult: Constant | None = None
    sinkhorn_iters: Iters | None = None

    @property
    def constants(self) -> dict[str, float]:
        """Every constant of the model but hc_mult: the preset's, or this case's own."""
        return {**PRESETS[self.preset], **self.model_dump(exclude={"preset"}, exclude_none=True)}


class Expected(Closed):
    """What the oracle gave when the case was blessed: a digest for each output."""

    contract: Literal[1]
    digests: dict[str, Annotated[str, Field(pattern=SHA256)]]


class Blessing(Closed):
    """One line of the file's history: when the digests were set, under which contract, and why."""

    date: date
    contract: Literal[1]
    reason: str = Field(min_length=10)


class Case(Closed):
    """One situation: an op, its shape and inputs, how it is sharded, and the bits that must come out.

    `catches` claims that some planted kernel of each class fails; `shows` claims more of a class: every planted
    kernel of it that is wrong in the named stage alone changes each of the named outputs.
    Sizes that the op does not have are left out and read as 1. Raises pydantic.ValidationError, which
    `cases.load` turns into one sentence.
    """

    schema_: Literal[1] = Field(alias="schema")
    name: str = Field(pattern=KEBAB)
    title: str = Field(min_length=15, max_length=200, description="one sentence: what this case pins")
    op: OpName
    tokens: int = Field(1, ge=0, le=MAX_TOKENS)
    hc_mult: int = Field(1, ge=1, le=MAX_STREAMS)
    hidden: int = Field(1, ge=1, le=MAX_HIDDEN)
    rows: int | None = Field(None, ge=1, le=MAX_ROWS, description="M, for ops that take any number of rows")
    entry: Literal["streams", "hidden"] = Field("streams", description="'hidden': x is [T, H], fn is [M, H]")
    tp: Annotated[tuple[Ranks, ...], FILLED]
    orders: Annotated[tuple[Order, ...], FILLED] = ("op-then-gather",)
    pad_fills: Annotated[tuple[PadFill, ...], FILLED] = ALL_FILLS
    size: Literal["small", "full", "large"] = Field(
        "small", description="small: anywhere; full: a model's width, few tokens; large: needs a GPU"
    )
    flags: Annotated[tuple[Flag, ...], FILLED]
    catches: Annotated[tuple[WrongKernel, ...], FILLED]
    shows: dict[WrongKernel, Annotated[Shown, Field(min_length=1)]] = Field(
        {},
        description="for a class in catches: by stage, the outputs that must differ when only that stage has the fault",
    )
    source: str = Field(pattern=SOURCE)
    inputs: CaseInputs = CaseInputs()
    params: Params | None = None
    config: Config | None = None
    expected: Expected | None = None
    history: Annotated[tuple[Blessing, ...], ARRAY] = ()

    @property
    def spec(self) -> Op:
        """The op's entry in the op table."""
        return OPS[self.op]

    @property
    def sizes(self) -> dict[str, int]:
        """The length of every dimension that `cases.ops` names."""
        n = self.hc_mult
        columns = self.hidden if self.entry == "hidden" else n * self.hidden
        rows = n * (n + 2) if self.rows is None else self.rows
        return {"T": self.tokens, "n": n, "H": self.hidden, "M": rows, "K": columns, "1": 1, "3": 3}

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments that this case passes, in calling order."""
        given = self.inputs.arguments
        return tuple(one for one in self.spec.arguments if not one.optional or one.name in given)

    def shape(self, argument: Argument) -> tuple[int, ...]:
        """The shape of one argument; a projection's input has no stream axis at the entry."""
        dims = argument.dims
        if self.op == "project" and self.entry == "hidden":
            dims = tuple(dim for dim in dims if dim != "n")
        return tuple(self.sizes[dim] for dim in dims)

    def made_by(self, argument: str) -> ArgumentInput:
        """The recipe and layout of one argument."""
        return self.inputs.arguments.get(argument, self.inputs.default)

    def pads(self, tp: int) -> bool:
        """Whether some rank of `tp` holds pad rows."""
        return self.tokens % tp != 0

    def fills(self, tp: int) -> tuple[PadFill, ...]:
        """The pad fills to try at `tp`; none when nothing is padded."""
        return self.pad_fills if self.pads(tp) else ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for check in _CHECKS:
            check(self)
        return self


def _refuse(key: str, expected: str, got: object) -> None:
    raise ValueError(f"{key}: expected {expected}, got {got}")


def _check_sizes(case: Case) -> None:
    """Sizes that the op has are given; sizes that it lacks are not."""
    dims = case.spec.dims
    uses = {"tokens": "T" in dims, "hc_mult": not dims.isdisjoint("nMK"), "hidden": not dims.isdisjoint("HK")}
    for key, used in uses.items():
        if used and key not in case.model_fields_set:
            _refuse(key, f"a number for op {case.op}", "none")
        if not used and getattr(case, key) != 1:
            _refuse(key, f"nothing for op {case.op}, which has no such size", getattr(case, key))
    if case.rows is not None and case.op not in ANY_ROWS:
        _refuse("rows", f"nothing, because op {case.op} fixes M at n * (n + 2)", case.rows)
    if case.entry == "hidden" and case.op not in ENTRY_OPS:
        _refuse("entry", f"'streams' for op {case.op}", "'hidden'")


def _check_elements(case: Case) -> None:
    """No argument is larger than a machine can be expected to hold."""
    for argument in case.arguments:
        elements = math.prod(case.shape(argument))
        if elements > MAX_ELEMENTS:
            _refuse(f"inputs.arguments.{argument.name}", f"at most {MAX_ELEMENTS} elements", elements)


def _check_tp(case: Case) -> None:
    """Ranks are distinct, there is something to shard, and the second order has inputs to gather."""
    if len(set(case.tp)) != len(case.tp):
        _refuse("tp", "each number of ranks once", list(case.tp))
    if "T" not in case.spec.dims and case.tp != (1,):
        _refuse("tp", f"[1], because op {case.op} has no tokens", list(case.tp))
    if "gather-then-op" in case.orders and not case.spec.per_token:
        _refuse("orders", f"only 'op-then-gather' for op {case.op}, which has weights", list(case.orders))


def _check_inputs(case: Case) -> None:
    """Tables name arguments of the op; x is given exactly where the entry says so."""
    names = [argument.name for argument in case.spec.arguments]
    for name in case.inputs.arguments:
        if name not in names:
            _refuse(f"inputs.arguments.{name}", f"an argument of {case.op} ({', '.join(names)})", repr(name))
    if case.op in ("pre", "pre_delayed") and ("x" in case.inputs.arguments) != (case.entry == "hidden"):
        _refuse("entry", "'hidden' if, and only if, inputs.arguments has x", repr(case.entry))


def _check_layouts(case: Case) -> None:
    """Each argument can take the layout and the bit patterns that are asked of it."""
    for argument in case.arguments:
        made, key = case.made_by(argument.name), f"inputs.arguments.{argument.name}"
        if made.layout == "transposed" and len(case.shape(argument)) < 2:
            _refuse(f"{key}.layout", "two axes or more for 'transposed'", f"{argument.name} with one")
        if made.layout == "far" and (argument.dtype != BF16 or not argument.per_token):
            _refuse(f"{key}.layout", "a bfloat16 argument with a token axis for 'far'", argument.name)
        digits = 4 if argument.dtype == BF16 else 8
        for bits in (*made.bits, *(patch.bits for patch in made.set if patch.bits is not None)):
            if len(bits) != digits:
                _refuse(key, f"{digits} hex digits for {argument.dtype}", repr(bits))
        for patch in made.set:
            _check_index(f"{key}.set", patch.index, case.shape(argument))


def _check_index(key: str, index: tuple[int, ...], shape: tuple[int, ...]) -> None:
    inside = all(0 <= at < size for at, size in zip(index, shape, strict=False))
    if len(index) > len(shape) or not inside:
        _refuse(key, f"an index inside {list(shape)}", list(index))


def _check_numbers(case: Case) -> None:
    """Exactly the op's parameters are given; hc_mult comes from the case, and capture_aux may stay off."""
    wanted = set(case.spec.parameters) - {"hc_mult", "config"}
    given = set(case.params.model_dump(exclude_none=True)) if case.params is not None else set()
    missing = wanted - given - {"capture_aux"}
    if missing or given - wanted:
        _refuse("params", f"{sorted(wanted) or 'nothing'} for op {case.op}", sorted(given) or "nothing")
    needs = "config" in case.spec.parameters
    if needs != (case.config is not None):
        _refuse("config", f"{'a preset' if needs else 'nothing'} for op {case.op}", case.config)


def _check_shows(case: Case) -> None:
    """Precise claims are about classes that the case catches, and about stages and outputs that its op has."""
    outputs = [output.name for output in case.spec.outputs]
    for kind, stages in case.shows.items():
        if kind not in case.catches:
            _refuse(f"shows.{kind}", f"a class in catches ({', '.join(case.catches)})", repr(kind))
        for stage, names in stages.items():
            key = f"shows.{kind}.{stage}"
            if stage not in case.spec.stages:
                _refuse(key, f"a stage of {case.op} ({', '.join(case.spec.stages) or 'none'})", repr(stage))
            if not set(names) <= set(outputs) or len(set(names)) != len(names):
                _refuse(key, f"outputs of {case.op} ({', '.join(outputs)}), each once", list(names))


def _check_expected(case: Case) -> None:
    """A blessed case has one digest for each output, in the op's order, and says why."""
    if case.expected is None:
        return
    names = [output.name for output in case.spec.outputs]
    if list(case.expected.digests) != names:
        _refuse("expected.digests", f"{names}", list(case.expected.digests))
    if not case.history:
        _refuse("history", "at least one entry in a blessed case", "none")


KEYS = sorted({field.alias or name for model in Closed.__subclasses__() for name, field in model.model_fields.items()})
"""Every key of a case file but the names of arguments, outputs, classes and stages."""

_CHECKS = (
    _check_sizes,
    _check_elements,
    _check_tp,
    _check_inputs,
    _check_layouts,
    _check_numbers,
    _check_shows,
    _check_expected,
)


def is_kebab(name: str) -> bool:
    """Whether `name` can name a case: lower-case words and digits joined by single dashes."""
    return re.fullmatch(KEBAB, name) is not None


def json_schema() -> dict[str, Any]:
    """The JSON schema of a case file, for editors and other readers."""
    schema = Case.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema

"""What every configuration class is made of: a frozen section that refuses unknown keys, and the number types it uses.

A number must be written as a number: text and booleans are refused where a count or a rate is asked for. A whole number
may be written as `5e8`. Building a section by hand raises `ConfigError`, as loading a file does.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic._internal._model_construction import ModelMetaclass
from pydantic_core import PydanticCustomError

from trilithon.errors import ConfigError

Dtype = Literal["fp32", "bf16", "fp16"]


class _RaisesConfigError(ModelMetaclass):
    """Turns pydantic's error into ours when a section is built by calling its class."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (a metaclass)
        try:
            return super().__call__(*args, **kwargs)
        except ValidationError as error:
            lines = [describe(dotted(item["loc"]), item) for item in error.errors()]
            raise ConfigError(f"{cls.__name__}: " + "; ".join(lines)) from None


class Section(BaseModel, metaclass=_RaisesConfigError):
    """A frozen group of settings. Unknown keys are refused; each field's docstring goes into the reference."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=False,
        hide_input_in_errors=True,
        ser_json_inf_nan="constants",
    )


def show(value: Any) -> str:
    """A value as it appears in a message: its `repr`, shortened."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 60
    try:
        return short.repr(value)
    except ValueError:  # a whole number with thousands of digits
        return f"<{type(value).__name__} too long to show>"


def kind_of(value: Any) -> str:
    """The type of a value in the words of a configuration file."""
    names: list[tuple[type | tuple[type, ...], str]] = [
        (bool, "true/false"),
        (int, "a whole number"),
        (float, "a number"),
        (str, "text"),
        (dict, "a block"),
        ((list, tuple), "a list"),
        (type(None), "null"),
    ]
    return next((name for cls, name in names if isinstance(value, cls)), f"a {type(value).__name__}")


def dotted(parts: tuple[int | str, ...]) -> str:
    """("zero", "unit_classes", 0) -> "zero.unit_classes.0"."""
    return ".".join(str(part) for part in parts)


def place(prefix: str, name: object) -> str:
    """The dotted key of `name` under a prefix such as "" or "zero."; a name that is not text is shown."""
    return prefix + (name if isinstance(name, str) else show(name))


def describe(key: str, error: Any) -> str:
    """One problem in one line, from an entry of pydantic's `errors()` with its input."""
    message = str(error["msg"]).replace("Input should be", "must be").removeprefix("Value error, ")
    given = error.get("input")
    if error["type"] == "missing":
        return f"{key}: missing, and it has no default"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{key}={show(given)} ({kind_of(given)}): must be a block of keys"
    own = {"tuple_type": "must be a list", "path_type": "must be a path", "string_type": "must be text"}
    message = own.get(error["type"], message)
    if error["type"] in ("too_short", "too_long"):
        low, high = error["ctx"].get("min_length"), error["ctx"].get("max_length")
        message = f"must hold at {'least' if high is None else 'most'} {low if high is None else high} values"
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key"
    if error["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}={show(given)} ({kind_of(given)}): {message}"


def _whole(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):  # numpy's integers included
        return int(value)
    raise PydanticCustomError("whole_number", "must be a whole number")


def _real(value: Any) -> Any:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise PydanticCustomError("real_number", "is too large for a number") from None
    raise PydanticCustomError("real_number", "must be a number")


def _flag(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    raise PydanticCustomError("flag", "must be true or false")


def named(value: Any) -> Any:
    """A bare string is short for a block that holds only its kind: "bf16" -> {"kind": "bf16"}."""
    return {"kind": value} if isinstance(value, str) else value


# The largest count: what fits in a signed 64-bit integer, since counts become tensor sizes and offsets.
_COUNT_MAX = 2**63 - 1

Whole = Annotated[int, BeforeValidator(_whole), Field(ge=-_COUNT_MAX, le=_COUNT_MAX)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=_COUNT_MAX)]
Positive = Annotated[int, BeforeValidator(_whole), Field(gt=0, le=_COUNT_MAX)]
Real = Annotated[float, BeforeValidator(_real), Field(allow_inf_nan=False)]
NonNegativeReal = Annotated[float, BeforeValidator(_real), Field(ge=0, allow_inf_nan=False)]
PositiveReal = Annotated[float, BeforeValidator(_real), Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(_real), Field(ge=0, le=1, allow_inf_nan=False)]
Decay = Annotated[float, BeforeValidator(_real), Field(ge=0, lt=1, allow_inf_nan=False)]
Betas = tuple[Decay, Decay]
Flag = Annotated[bool, BeforeValidator(_flag)]

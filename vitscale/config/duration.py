"""A length of training: a number and what is counted."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

_DURATION = re.compile(r"^\s*([0-9][0-9_]{0,19}(?:\.[0-9]{1,30})?)\s*(steps?|epochs?|samples?|percent)\s*$")
_UNITS = {"step": "steps", "epoch": "epochs", "sample": "samples", "percent": "percent"}


@dataclass(frozen=True)
class Duration:
    """A length of training with its unit: `300 epochs`, `10_000 steps`, `3_000_000 samples`, `5 percent`.

    In YAML and JSON it is text; `parse` and `str` are each other's inverse.
    """

    value: float
    unit: Literal["steps", "epochs", "samples", "percent"]

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Read `text`; raises ValueError that says what a duration looks like."""
        match = _DURATION.match(text)
        if not match:
            raise ValueError(
                f"{text!r} is not a duration; write a number and a unit, e.g. '300 epochs', '10_000 steps', "
                "'3_000_000 samples' or '5 percent'"
            )
        unit = match[2] if match[2] == "percent" else match[2].rstrip("s")
        return cls(float(match[1].replace("_", "")), _UNITS[unit])  # type: ignore[arg-type]

    def steps(self, *, num_samples: int, global_batch: int, total: int | None) -> int:
        """This duration in optimizer steps, rounded up so that no asked-for sample is left out.

        Args:
            num_samples: Samples in one epoch of the training set.
            global_batch: Samples in one step, over all ranks.
            total: Steps of the whole run, for `percent`; None where percent has no meaning.

        Raises:
            ValueError: `percent` without a total.
        """
        # The decimal number that was written, not its nearest double: 1.1 epochs of 10 samples are 11 samples, not 12.
        value = Fraction(repr(float(self.value)))
        if self.unit == "steps":
            return math.ceil(value)
        if self.unit == "percent":
            if total is None:
                raise ValueError(f"'{self}' needs a total to be a percentage of")
            return math.ceil(value * total / 100)
        samples = value * num_samples if self.unit == "epochs" else value
        return math.ceil(samples / global_batch)

    def __str__(self) -> str:
        number = f"{Decimal(repr(float(self.value))):f}"
        return f"{number.removesuffix('.0')} {self.unit}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            cls.parse, core_schema.str_schema(strict=True), serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "pattern": _DURATION.pattern, "examples": ["300 epochs", "10_000 steps", "5 percent"]}

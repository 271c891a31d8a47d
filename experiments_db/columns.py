"""Column types that mean the same on SQLite and PostgreSQL: moments, JSON, closed sets; and the JSON that is hashed."""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import DateTime, Dialect, Enum, String, Text
from sqlalchemy.types import TypeDecorator

Id = String(26)
"""A ULID."""
Sha256 = String(64)
"""A SHA-256 as 64 hexadecimal digits."""


def utc_now() -> datetime:
    """This moment, with its time zone."""
    return datetime.now(UTC)


def canonical_json(value: Any) -> str:
    """The one text of a JSON value: keys sorted, no white space, UTF-8 as it is. Its hash names the value.

    Raises:
        ValueError: it holds NaN or an infinity, which JSON has no word for.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))


def sha256_of(text: str) -> str:
    """SHA-256 of a text in UTF-8, as 64 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def snake_case(name: str) -> str:
    """`EvalRun` as `eval_run`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class UtcDateTime(TypeDecorator[datetime]):
    """A moment, to the microsecond. It goes in with a time zone and comes out in UTC, on every database."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value.isoformat()} has no time zone; use utc_now() or datetime.now(UTC)")
        in_utc = value.astimezone(UTC)
        return in_utc.replace(tzinfo=None) if dialect.name == "sqlite" else in_utc

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class NotJsonError(Exception):
    """A JSON column holds something else; `engine.explained` says where."""


class CanonicalJson(TypeDecorator[Any]):
    """A JSON value as its canonical text, the same bytes on every database. Assign a new value; changes inside one are
    not noticed."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:  # noqa: ARG002
        return None if value is None else canonical_json(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:  # noqa: ARG002
        try:
            return None if value is None else json.loads(value)
        except ValueError as error:
            raise NotJsonError(str(error)) from error


def closed(kind: type[StrEnum]) -> Enum:
    """A column that holds one value of a closed set, as text that a CHECK guards."""
    return Enum(
        kind,
        name=snake_case(kind.__name__),
        native_enum=False,
        create_constraint=True,
        validate_strings=True,
        length=32,
        values_callable=lambda members: [member.value for member in members],
    )

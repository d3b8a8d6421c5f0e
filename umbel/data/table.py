"""Tables with a schema: a site checks its CSV or parquet file against it, and rows become numbers.

A node serves a table with ``reader="umbel.data.table:read schema=/data/schema.toml"``.
"""

from __future__ import annotations

import re
import unicodedata
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Protocol
from zipfile import BadZipFile

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.tseries.api import guess_datetime_format

from umbel.data.data import Dataset, Manifest, check, offsets_of
from umbel.data.hints import Syntax
from umbel.data.schema import FALSE, TRUE, Column, Schema, repeated
from umbel.protocol.errors import DatasetError, SiteError
from umbel.protocol.project import to_install
from umbel.protocol.words import count_of

MISSING = ("", "na", "n/a", "n.a.", "#n/a", "<na>", "nan", "nat", "null", "-", "--", "?", ".")
"""Texts that stand for a missing value, in any case."""

_OTHERS = (".json", ".jsonl", ".ndjson", ".xlsx", ".xls", ".ods", ".feather", ".arrow")
"""Other table formats, which a CSV reader would take for one column of garbage."""

ISO_DATE = r"\d{4}-\d{2}-\d{2}(?:[T ].*)?"

# With signs between thousands and a currency before or after. 0,250 has a decimal comma, and 1 234,567.8 is no number.
_NUMBER = re.compile(
    r"(?P<sign>[+-])? ?(?P<money>[$€£¥])? ?(?(sign)|(?P<late>[+-])?)(?=\.?\d)"
    r"(?P<digits>(?:[1-9]\d{0,2}(?:(?:,\d{3})+|(?:'\d{3})+|(?: \d{3})+)|\d+)?(?:\.\d*)?(?:[eE][+-]?\d+)?)"
    r"(?(money)| ?[$€£¥]?)"
)
CURRENCY = "[$€£¥]"
_PLAIN = str.maketrans({"\u2212": "-", "\u2019": "'", "\xa0": " ", "\u202f": " ", "\u2009": " "})
_SWAPPED = str.maketrans(",.", ".,")

_COMMA = r"[+-]?\d+,\d+"  # with a decimal comma, or one between thousands

ENCODINGS = {"utf-8-sig": "UTF-8", "utf-16": "UTF-16", "cp1252": "Windows-1252"}
"""A file's encoding is the first of these in which it can be read: UTF-16 begins with a mark, and nearly all bytes are
letters in the last."""

_SHORT = ("%d/%m/%y", "%m/%d/%y", "%d.%m.%y", "%d-%m-%y", "%m-%d-%y", "%d-%b-%y", "%d %b %y")
"""Formats with a year of two digits, which pandas does not guess."""

_OF_MONTHS = ("%b-%Y", "%b %Y", "%B-%Y", "%B %Y", "%m/%Y", "%Y-%m", "%Y/%m")
"""Formats without a day, which are read as the first of the month; bare years and numbers are no dates."""

_SPACES = re.compile(r"\s*[^\S ]+\s*")
"""Line breaks and spaces of other kinds, with the spaces around them."""

_NUMBERED = re.compile(r"0*(\d+)(?:\.0+)?")
"""A client's number, as different programs write it."""

_MOST_SURPLUS = 30
"""A row may have so many fields, all of them empty, after those of the header."""

_FEW = 3  # examples of texts

_MOST_ABSENT = 10
"""A hint lists so many texts that may count as missing."""

UNIT = r".*\d\)?\s*([^\d\s.,'()+$€£¥-](?:[^\d]{0,8}[^\d\s])?)"
"""A number with a unit after it."""

# What may change a number in a few rows: a letter, a percent sign, a multiple or a bound. In most rows it is a unit.
_NO_UNIT = re.compile(
    r"\S|.*\s.*|(?:percent|pct|dozen|hundred|thousand|tsd|mi?ll?n?|mi?n|mio|million|billion|bn|mrd|lakh|crore|[ap]m"
    r"|plus|up|over|above|more|older|under|below|less|younger)s?",
    re.IGNORECASE,
)

_LARGEST_EXACT = 2**53 - 1
"""The largest integer that a 64-bit number holds apart from its neighbours."""

_BLURRED = "too large to tell from its neighbours"
_BLUR = 0.05

Client = int | str
Derive = Callable[[pd.DataFrame], pd.DataFrame]


@dataclass(frozen=True)
class Rows:
    """The rows of a table as numbers: features (rows, numbers of a row), and the rest (rows,)."""

    features: NDArray[np.float32]
    targets: NDArray[Any]  # float32; int64 for the classes of a category; int8 of -1 and 1 for a boolean
    labelled: NDArray[np.bool_]  # where the table has a target; elsewhere `targets` holds a placeholder
    clients: list[Client]
    places: NDArray[np.int64]  # the table's row number of each, from 0
    left_out: Mapping[str, int]  # number of dropped rows by reason
    clipped: Mapping[str, int]  # number of values that were taken to the bound of their range, by column
    blurred: Sequence[Column]  # columns whose numbers differ by too little for 32 bits
    styles: Sequence[str]  # how numbers are written, as sentences, where the schema does not say it

    @property
    def notes(self) -> list[str]:
        """Sentences on the rows left out, and the values changed or read in another way."""
        return [
            *self.styles,
            *(f"Rows left out: {count:,}, because {reason}." for reason, count in self.left_out.items()),
            *(f"Values of {name} taken to the bound of its range: {count:,}." for name, count in self.clipped.items()),
        ]


@dataclass(frozen=True)
class Fault:
    """Rows of a column that do not fit: the first, counted from 1, how many there are, and how to mend them.

    `mend` has the entries of the column with which they fit, where there are some.
    """

    what: str
    column: str
    row: int
    count: int
    fix: str
    mend: Mapping[str, Any] = field(default_factory=dict)
    code: str = "data.bad-value"

    def __str__(self) -> str:
        more = f" (and in {count_of(self.count - 1, 'more row')})" if self.count > 1 else ""
        return f"{self.column} in data row {self.row} is {self.what}{more}; {self.fix}"


@dataclass
class Reading:
    """The faults of all columns of a table, called `source` in errors, the numbers that were clipped, and notes on how
    numbers are written."""

    source: Any
    syntax: Syntax = Syntax.SCHEMA
    faults: list[Fault] = field(default_factory=list)
    clipped: dict[str, int] = field(default_factory=dict)
    styles: list[str] = field(default_factory=list)

    def add(self, series: pd.Series, odd: Any, column: Column, what: str, fix: str, **mend: Any) -> None:
        """Note the odd rows of a column (rows,), if there are any."""
        bad = series[np.asarray(odd)]
        if len(bad):
            value, lacks = bad.iloc[0], what == "missing"
            what = what if lacks else f"{value.item() if isinstance(value, np.generic) else value!r}, {what}"
            # A prediction's schema adds no numbers, and takes the values that the run's takes.
            if mend and self.syntax is not Syntax.PREDICTION:
                fix = f"{fix}, or set {' '.join(self.syntax.entry(column.name, *one) for one in mend.items())}"
            at = column.name, int(bad.index[0]) + 1, len(bad), fix, mend
            self.faults.append(Fault(what, *at, code="data.missing-value" if lacks else "data.bad-value"))

    def end(self, text: str = "") -> None:
        """Raise a `DatasetError` if there is a fault; by default its text names each."""
        if self.faults:
            codes, told = {fault.code for fault in self.faults}, ". ".join(map(str, self.faults))
            text = text or f"{self.source}: {told}"
            raise DatasetError(text, code=codes.pop() if len(codes) == 1 else "data.faults")


class Register(Protocol):
    """A site's numbering of its clients, from 0. A ledger identifies clients by these numbers."""

    def read(self) -> list[Client]:
        """Return the clients in order of their numbers."""

    def extend(self, known: Sequence[Client], new: Sequence[Client]) -> None:
        """Give new clients the next numbers after the known ones."""


def read(path: Path, register: Register, schema: str = "", derive: Derive | None = None) -> Dataset:
    """Check a site's table against its schema, and return it as a dataset in memory.

    The order of the table's rows does not matter.

    Parameters
    ----------
    path : Path
        The table, a CSV (``.csv``, ``.csv.gz``, ``.csv.zip``) or a parquet file.
    register : Register
        The numbers of the clients. A new client gets the next number, and no client may disappear.
    schema : str
        Path of the schema.
    derive : callable, optional
        For your own reader: gets the rows and returns them with extra columns, or with fewer rows.

    Raises
    ------
    DatasetError
        If the table does not fit the schema, or a client of the register is gone. The text
        names the file, the column, the row and the fix.
    """
    if not Path(schema).is_absolute():
        fix = "add schema=/path/to/schema.toml to the node's reader"
        raise SiteError(f"{path} is a table without a schema: {fix}", code="site.no-schema")
    what = Schema.read(Path(schema))
    rows = encode(read_table(path), what, path, derive)
    if not rows.clients:
        why = ", ".join(f"{reason}: {count} rows" for reason, count in rows.left_out.items()) or "it has none"
        raise DatasetError(f"{path}: no rows are left ({why}); repair the table or its schema", code="data.no-rows")
    known = register.read()
    present = set(rows.clients)
    if gone := [client for client in known if client not in present]:
        wrong = f"{path}: the ledger numbers clients {gone}, who lack rows now"
        raise DatasetError(f"{wrong}; put their rows back, under these names", code="data.gone-clients")
    new = sorted(present - set(known), key=lambda client: (str(type(client)), client))
    order = [*known, *new]
    owner = pd.Index(order, dtype=object).get_indexer(pd.Index(rows.clients, dtype=object))
    # Rows are sorted by content: the same table in another order is the same dataset.
    sort = np.lexsort((rows.targets, *rows.features.T[::-1], owner))
    split = {"train": len(order), "validation": 0}
    manifest = Manifest(name=what.name or path.name, clients=len(order), split=split, **what.said)
    offsets = offsets_of(np.bincount(owner))
    dataset = Dataset(manifest, rows.features[sort], rows.targets[sort], offsets, [str(one) for one in order])
    check(dataset, path)
    if new:
        register.extend(known, new)
    return dataset


def read_table(path: Path) -> pd.DataFrame:
    """Read a CSV, with all columns as text, or a parquet file, with its types; raise `DatasetError` for other files.

    The first line shows whether commas, semicolons or tabs separate columns. The frame's attribute ``encoding`` names
    the encoding.
    """
    if not path.is_file():
        raise DatasetError(f"{path} is not a file; give a CSV or parquet file", code="data.no-file")
    if path.suffix.lower() in _OTHERS:
        raise DatasetError(f"{path} is neither CSV nor parquet; save it as one of these", code="data.unreadable")
    parquet = path.suffix.lower() in (".parquet", ".pq")
    try:
        return pd.read_parquet(path) if parquet else _read_csv(path)
    except ImportError:
        text = f"{path} needs pyarrow: pip install {to_install('pyarrow')}"
        raise DatasetError(text, code="data.needs-pyarrow") from None
    except (OSError, EOFError, ValueError, BadZipFile, zlib.error) as error:
        told = " ".join(str(error).split())
        kind, fix = ("parquet", "write it again") if parquet else ("CSV", "save it as CSV in UTF-8")
        if isinstance(error, pd.errors.ParserError):
            fix = "repair that line, or quote values that have a comma"
        raise DatasetError(f"{path} cannot be read as {kind}: {told}; {fix}", code="data.unreadable") from None


def _read_csv(path: Path) -> pd.DataFrame:
    *first, last = ENCODINGS
    for encoding in first:
        with suppress(UnicodeError):
            return _decoded(path, encoding)
    return _decoded(path, last)


def _decoded(path: Path, encoding: str) -> pd.DataFrame:
    options: dict[str, Any] = {"dtype": str, "keep_default_na": False, "encoding": encoding}
    heads = {sep: pd.read_csv(path, sep=sep, header=None, nrows=1, **options).iloc[0].tolist() for sep in ",;\t"}
    # Names may have commas, as in "height, cm": if as many semicolons are there, these separate.
    separator = max(heads, key=lambda sep: (len(heads[sep]), len(heads[sep]) > 1 and sep != ","))
    head = heads[separator]
    # A spreadsheet's header may have line breaks.
    head = [_SPACES.sub(" ", name).strip() for name in head]
    twice = repeated(head)
    faults = [f"two columns are called {name!r}; rename one" for name in twice]
    if twice:  # the rest of the file is looked at first
        head = [f"{name}\0{place}" if name in twice else name for place, name in enumerate(head)]
    # Of a table with a single column, an empty line is a missing value.
    options |= {"sep": separator, "index_col": False, "header": 0, "skip_blank_lines": len(head) > 1}
    frame = _with_names(path, head, options)
    for name in (name for name in frame.columns if name.startswith("\0")):
        place, values = int(name[1:]), frame.pop(name).fillna("").str.strip()
        if place == 0 and values.is_unique:
            continue  # R and pandas begin each row with its number or name
        if len(full := np.flatnonzero(values != "")):
            wrong = f"data row {full[0] + 1} has a value in column {place + 1}, which has no name"
            faults.append(f"{wrong}; name or remove it, or quote values with commas")
    if faults:
        text = f"{path}: {'. Also, '.join(faults)}"
        raise DatasetError(text, code="data.twice" if twice else "data.missing-column")
    frame.attrs |= {"separator": separator, "encoding": ENCODINGS[encoding]}
    return frame


def _with_names(path: Path, head: Sequence[str], options: dict[str, Any]) -> pd.DataFrame:
    """Read the rows of a CSV. Columns without a name get one that begins with a null character.

    Spreadsheets end lines with separators: rows may have more fields than the header.
    """
    for more in range(_MOST_SURPLUS + 1):  # exactly as many as there are: pandas takes no more
        names = [name or f"\0{place}" for place, name in enumerate([*head, *[""] * more])]
        with warnings.catch_warnings(), suppress(pd.errors.ParserWarning):
            warnings.simplefilter("error", pd.errors.ParserWarning)  # rows have more fields than there are names
            found: pd.DataFrame = pd.read_csv(path, names=names, **options)
            return found
    raise ValueError(f"rows have over {_MOST_SURPLUS} fields more than the {len(head)} of the first line")


def encode(
    frame: pd.DataFrame,
    schema: Schema,
    source: Any,
    derive: Derive | None = None,
    *,
    to_predict: bool = False,
    syntax: Syntax = Syntax.SCHEMA,
) -> Rows:
    """Check a table against a schema, and return its rows as numbers.

    `source` is the table's name in errors. These name all columns that do not fit, the first bad row of each, counted
    from 1 below the header, and the fix in a `syntax`. For `derive` see `read`. Rows `to_predict` need no target.
    """
    frame, reading = frame.reset_index(drop=True), Reading(source, syntax)
    left_out: dict[str, int] = {}
    target = [] if to_predict else [schema.target]
    for column in (*target, *schema.features):
        if column.other == "drop" and column.name in (found := named(frame, schema.columns)).columns:
            series = found[column.name]
            known = (places_in(series, column) >= 0) | missing_in(series, column)
            frame = _keep(frame, known, left_out, f"{column.name} is not one of its categories")
    if derive is not None:
        frame = derive(frame)
    frame = named(frame, schema.columns)
    needed = [*schema.features, *target, *([schema.client] if schema.client else [])]
    check_columns(frame, needed, source)
    for column in needed:
        if (column.missing or schema.missing) == "drop":
            there = ~missing_in(frame[column.name], column) | (column.fill != "")
            frame = _keep(frame, there, left_out, f"{column.name} is missing")
    scaled = [seen(frame, column, reading) for column in schema.features]
    labelled = _labelled(frame, schema.target) if to_predict else np.ones(len(frame), np.bool_)
    targets, blurred = _targets(frame, labelled, schema.target, reading)
    clients: list[Client] = [schema.name or "all"] * len(frame)
    if schema.client is not None:
        clients = clients_in(frame, schema.client, reading)
    reading.end()
    stacked = np.concatenate(scaled, axis=1).astype(np.float32)
    lost = [column for column, numbers in zip(schema.features, scaled, strict=True) if _blurs(numbers)]
    lost += [schema.target] * blurred
    return Rows(
        features=stacked,
        targets=targets,
        labelled=labelled,
        clients=clients,
        places=frame.index.to_numpy(np.int64),
        left_out=left_out,
        clipped=reading.clipped,
        blurred=lost,
        styles=reading.styles,
    )


def _blurs(numbers: NDArray[np.float64]) -> bool:
    """Return whether rounding to 32 bits moves numbers (rows, m) by more than `_BLUR` of their whole range."""
    if not len(numbers):
        return False
    with np.errstate(over="ignore"):
        moved = np.abs(numbers.astype(np.float32) - numbers).max(axis=0)
    return bool((np.isfinite(moved) & (moved > _BLUR * np.ptp(numbers, axis=0)) & (np.ptp(numbers, axis=0) > 0)).any())


def _labelled(frame: pd.DataFrame, target: Column) -> NDArray[np.bool_]:
    """Return a mask of the rows (rows,) that have a target."""
    if target.name not in frame.columns:
        return np.zeros(len(frame), np.bool_)
    series = frame[target.name]
    known = places_in(series, target) >= 0 if target.other == "drop" else True
    return np.asarray(~missing_in(series, target) & known, np.bool_)


def _targets(
    frame: pd.DataFrame, labelled: NDArray[np.bool_], target: Column, reading: Reading
) -> tuple[NDArray[Any], bool]:
    """Return the targets that a dataset stores (rows,), and whether they blur (see `_blurs`).

    Where there is no label, a target is a valid placeholder.
    """
    targets = np.zeros(len(frame))
    if labelled.any():
        targets[labelled] = values_of(frame[labelled], target, reading)
    if target.type == "category":
        return targets.astype(np.int64), False
    if target.type == "boolean":
        return (2 * targets - 1).astype(np.int8), False
    with np.errstate(over="ignore"):
        scaled = targets / target.scale
    if labelled.any():
        _check_size(frame[target.name], scaled[:, None], target, reading)
    return scaled.astype(np.float32), _blurs(scaled[labelled, None])


def seen(frame: pd.DataFrame, column: Column, reading: Reading) -> NDArray[np.float64]:
    """Return a model's view of a feature (rows, numbers), each as `Column.stored` says; rows of a fault are made up."""
    series = column_in(frame, column)
    indicate = column.missing == "indicate"
    lacks = missing_in(series, column).to_numpy(np.bool_)
    there = ~lacks if indicate and column.fill == "" else np.ones(len(series), np.bool_)
    stored = column.stored[:-1] if indicate else column.stored
    numbers = np.zeros((len(series), len(stored)))
    values = _numbers(series[there], column, reading, ("drop", "indicate"))
    with np.errstate(over="ignore"):
        numbers[there] = (values - [one["offset"] for one in stored]) / [one["scale"] for one in stored]
    _check_size(series, numbers, column, reading)
    return np.column_stack([numbers, lacks]) if indicate else numbers


def values_of(frame: pd.DataFrame, column: Column, reading: Reading) -> NDArray[np.float64]:
    """Return a column's numbers (rows,), not scaled; for a category, the position in its list."""
    single = column.model_copy(update={"encode": "index"})
    return _numbers(column_in(frame, column), single, reading, ("drop",))[:, 0]


def _numbers(series: pd.Series, column: Column, reading: Reading, missing: Sequence[str]) -> NDArray[np.float64]:
    """Return the numbers of a column (rows, numbers) before scaling; `missing` says how to treat missing values."""
    syntax = reading.syntax

    def note(odd: Any, what: str, fix: str = "repair or remove that row", **mend: Any) -> None:
        reading.add(series, np.asarray(odd) & ~lacks, column, what, fix, **mend)

    if column.type == "category":
        _check_exact(series, column, reading)
    lacks = missing_in(series, column).to_numpy(np.bool_)
    if column.fill != "":
        series, lacks = series.astype(object).where(~lacks, column.fill), np.zeros(len(series), np.bool_)
    elif lacks.any():
        ways = [*map(syntax.missing, missing), syntax.entry(column.name, "missing", missing[-1])]
        if syntax is Syntax.PREDICTION:
            ways = [syntax.entry(column.name, "missing", "drop")]
        reading.add(series, lacks, column, "missing", f"fill it in, or set {' or '.join(ways)}")
    if column.type == "category":
        index = places_in(series, column)
        if column.other == "category":
            index = np.where(index >= 0, index, len(column.categories))
        fix = f"repair that row, or list the category ({syntax.entry(column.name, 'categories', ['...'])})"
        if syntax is Syntax.PREDICTION:
            fix = f"repair that row, or leave out such rows by {syntax.entry(column.name, 'other', 'drop')}"
        other = "category" if "indicate" in missing else "drop"
        note(index < 0, f"not one of its categories {', '.join(column.categories)}", fix, other=other)
        index = np.maximum(index, 0)
        return np.eye(len(column.classes))[index] if column.encode == "one-hot" else index.astype(np.float64)[:, None]
    if column.type == "boolean":
        texts = as_texts(series).str.lower().replace({"1.0": "1", "0.0": "0", "-1.0": "-1"})
        odd = ~texts.isin((*TRUE, *FALSE)).to_numpy(np.bool_) & ~lacks
        note(odd, "not true or false", **_absent(series[odd], column))
        return texts.isin(TRUE).to_numpy().astype(np.float64)[:, None]
    if column.type == "date":
        days = as_dates(series, column)
        if (odd := days.isna().to_numpy(np.bool_) & ~lacks).any():
            fits = [one for one in formats_of(as_texts(series[~lacks])) if one != column.format]
            mend: Mapping[str, Any] = {"format": fits[0]} if fits else _absent(series[odd], column)
            note(odd, f"not a date as {column.format or '2024-01-31'}", **mend)
        days = days.fillna(pd.Timestamp(column.since))
        since = days_since(days, column)
        parts = {"year": days.dt.year, "month": days.dt.month, "weekday": days.dt.day_of_week, "days": since}
        return np.column_stack([parts[part].to_numpy(np.float64) for part in column.parts])
    if syntax is Syntax.PREDICTION:  # new rows may have units and commas that those of the run lacked
        texts, given = as_texts(series[~lacks]), column.model_dump(include={"unit", "decimal"}, exclude_defaults=True)
        style = style_of(texts, given, ["either"])
        reading.styles += style_note(column.name, texts, style) if style.keys() - given.keys() else []
        column = column.model_copy(update=style)
    values = as_numbers(series, column).copy()
    if series.attrs.get("separator") == ";" and not column.decimal and _comma(as_texts(series[~lacks])):
        comma = as_texts(series).str.fullmatch(_COMMA)
        note(comma, "which may have a decimal comma", "write it with a decimal point", decimal=",")
        lacks, values[comma] = lacks | comma, np.nan
    sound = np.isfinite(values)
    odd = ~sound & ~lacks
    unit = f"the unit {column.unit} or none" if column.unit else "no unit"
    fix = f"write it with a decimal {'comma' if column.decimal == ',' else 'point'} and {unit}, or remove that row"
    note(odd, "not a number", fix, **_absent(series[odd], column))
    values = np.where(sound, values, 0.0)
    if column.type == "integer":
        note(sound & (values % 1 != 0), "not an integer", type="number")
    low = -np.inf if column.minimum is None else column.minimum
    high = np.inf if column.maximum is None else column.maximum
    far = sound & ((values < low) | (values > high))
    # A prediction reveals nothing, and is better made from the bound than refused for a whole table.
    clips = column.outside == "clip" or syntax is Syntax.PREDICTION
    if clips and far.any():
        reading.clipped[column.name] = int(far.sum())
    elif far.any():
        fix = "is it in another unit? Repair or remove that row"
        # Where most are, the range is wrong: all would be one number.
        mends = {"outside": "clip"} if 2 * far.sum() < sound.sum() else {}
        note(far, f"not from {low:,.10g} to {high:,.10g}", fix, **mends)
    return np.clip(values, low, high)[:, None] if clips else values[:, None]


def _absent(odd: pd.Series, column: Column) -> Mapping[str, Any]:
    """Return the entry by which a few odd texts count as missing; none for many."""
    texts = sorted(as_texts(odd).unique().tolist())
    return {"na": [*column.na, *texts]} if 0 < len(texts) <= _MOST_ABSENT else {}


def as_numbers(series: pd.Series, column: Column | None = None) -> NDArray[np.float64]:
    """Return numbers, or texts of numbers, without scaling; NaN where there is none (see `number_in`)."""
    if pd.api.types.is_numeric_dtype(series) and not pd.api.types.is_bool_dtype(series):
        return series.to_numpy(np.float64, na_value=np.nan)
    texts = as_texts(series)
    unit, decimal = (column.unit, column.decimal) if column else ("", "")
    # Where either sign is decimal, a comma before three digits may be one between thousands.
    texts = texts if decimal != "either" else texts.mask(texts.str.contains(r",\d{3}(?!\d)"), "").str.replace(",", ".")
    plain = texts if decimal != "," else texts.where(~texts.str.contains("[.,]"))
    values = pd.to_numeric(plain, errors="coerce").to_numpy(np.float64, na_value=np.nan, copy=True)
    rest = texts[np.isnan(values)]
    if len(rest):
        places, known = pd.factorize(rest)
        values[np.isnan(values)] = np.array([number_in(str(one), unit, decimal) for one in known] or [np.nan])[places]
        signs = texts.str.extract(f"({CURRENCY})", expand=False)
        if signs.nunique() > 1:  # a sum in two currencies is none
            values[(signs.notna() & (signs != signs.mode()[0])).to_numpy(np.bool_)] = np.nan
    return values


def number_in(text: str, unit: str = "", decimal: str = "") -> float:
    """Return the number in a text, NaN if there is none or it may be another.

    It may have a currency sign, the column's unit, signs between thousands and an accountant's minus.
    """
    bare = text.translate(_PLAIN).strip()
    if unit and unit in bare:
        bare = (bare.removesuffix(unit) if bare.endswith(unit) else bare.removeprefix(unit)).strip()
    # An accountant's minus.
    bare = re.sub(r"\((.*)\)|(.*)-", r"-\1\2", bare) if bare[-1:] in (")", "-") else bare
    found = _NUMBER.fullmatch(bare.translate(_SWAPPED) if decimal == "," else bare)
    if not found:
        return float("nan")
    return float((found["sign"] or found["late"] or "") + re.sub("[,' ]", "", found["digits"]))


def style_of(texts: pd.Series, given: Mapping[str, Any], decimals: Sequence[str]) -> dict[str, Any]:
    """Return the unit and the decimal sign with which all numbers in text are written, if they have these.

    Those `given` hold, and otherwise the first of `decimals` that reads all.
    """
    style = {key: given[key] for key in ("unit", "decimal") if key in given}
    units = texts.str.extract(UNIT, expand=False)
    if units.nunique() == 1 and (units.notna().mean() > 0.5 or not _NO_UNIT.fullmatch(units.dropna().iloc[0])):
        style = {"unit": str(units.dropna().iloc[0])} | style
    for tried in (style, *({"decimal": one} | style for one in decimals)):
        if np.isfinite(as_numbers(texts, Column(name="-", type="number", **tried))).all():
            return tried
    return {}


def style_note(name: str, texts: pd.Series, style: Mapping[str, Any]) -> list[str]:
    """Return a note on how the numbers of a column, in text, are read: without unit, decimal comma or currency."""
    ways = {
        f"with the unit {style.get('unit')}": re.escape(style.get("unit", "")),
        "with a decimal comma": "," if style.get("decimal") in (",", "either") else "",
        "without the currency": CURRENCY,
    }
    read = {how: few.iloc[0] for how, mark in ways.items() if mark and len(few := texts[texts.str.contains(mark)])}
    examples = " and ".join(dict.fromkeys(map(repr, read.values())))
    return [f"Numbers of {name}, as {examples}, are read {' and '.join(read)}."] if read else []


def formats_of(texts: pd.Series) -> list[str]:
    """Return the formats of a date that read the most texts, if these are more than half, each otherwise.

    Two are an ambiguity of day and month.
    """
    known = pd.Series(texts.unique(), dtype=str)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # about the order, which all texts decide
        guessed = [
            guess_datetime_format(str(one), dayfirst=first) or "" for first in (True, False) for one in known[:20]
        ]
    # With points, the day is first.
    styles = [style for style in dict.fromkeys([*guessed, *_SHORT]) if "%d" in style and not style.startswith("%m.")]
    styles += _OF_MONTHS
    days = {style: pd.to_datetime(known, format=style, errors="coerce") for style in styles}
    most = max((read.notna().sum() for read in days.values()), default=0)
    best = {tuple(read): style for style, read in reversed(days.items()) if read.notna().sum() == most}
    return list(best.values())[::-1] if 2 * most > len(known) else []


def _comma(texts: pd.Series) -> bool:
    """Return whether all texts are numbers, some with one comma, which may be decimal or between thousands."""
    commas = texts.str.fullmatch(_COMMA)
    return bool(commas.any() and (commas | texts.str.fullmatch(r"[+-]?\d+")).all())


def as_dates(series: pd.Series, column: Column) -> pd.Series:
    """Return dates as they are written, in any time zone; NaT where there is none."""
    if pd.api.types.is_datetime64_any_dtype(series):
        plain: pd.Series = series.dt.tz_localize(None)
        return plain
    texts = as_texts(series)
    days = pd.to_datetime(texts.where(texts.str.fullmatch(ISO_DATE)).str[:10], format="%Y-%m-%d", errors="coerce")
    if not column.format:
        return days
    # Only texts have a format; a parquet file may hold dates.
    typed = np.array([isinstance(one, date) for one in series], np.bool_)
    return days.where(typed, pd.to_datetime(texts, format=column.format, errors="coerce"))


def days_since(dates: pd.Series, column: Column) -> pd.Series:
    """Return the days from the column's first day to each date."""
    days: pd.Series = (dates.dt.normalize() - pd.Timestamp(column.since)).dt.days
    return days


def clients_in(frame: pd.DataFrame, column: Column, reading: Reading) -> list[Client]:
    """Return the client of each row, and note the faults."""
    series = column_in(frame, column)
    if column.type == "integer":
        values = values_of(frame, column, reading)
        large = np.abs(values) > _LARGEST_EXACT
        reading.add(series, large, column, _BLURRED, "give that column the type text")
        return [int(value) for value in values]
    fix = f"name the client, or set {reading.syntax.entry(column.name, 'missing', 'drop')}"
    reading.add(series, missing_in(series, column), column, "missing", fix)
    _check_exact(series, column, reading)
    return as_texts(series).tolist()


def as_texts(series: pd.Series, pattern: str = "") -> pd.Series:
    """Return texts without surrounding spaces, or the matches of a pattern in them; integers have no decimal point."""
    if pd.api.types.is_float_dtype(series):
        return series.map(lambda value: f"{value:.0f}" if value % 1 == 0 else str(value)).astype(str)
    texts = series.astype(str).str.strip()
    return texts.str.extract(pattern, expand=True).iloc[:, 0].fillna(texts) if pattern else texts


def places_in(series: pd.Series, column: Column) -> NDArray[np.int64]:
    """Return the place of each value (rows,) among a column's categories, -1 for another.

    A code may lose or gain ``.0`` between two tables, as pandas writes integers as 2.0 where some are missing. A word
    may be written in another case.
    """
    texts, listed = as_texts(series, column.pattern), pd.Series(column.categories, dtype=str)
    places = pd.Index(listed).get_indexer(pd.Index(texts))
    for plain in (_bare, folded):
        if (other := places < 0).any() and (same := plain(listed)).is_unique:
            places[other] = pd.Index(same).get_indexer(pd.Index(plain(texts[other])))
    return np.asarray(places, np.int64)


def _bare(texts: pd.Series) -> pd.Series:
    return texts.str.replace(r"^([+-]?\d+)\.0+$", r"\1", regex=True)


def folded(texts: pd.Series) -> pd.Series:
    """Return words in one case; a single letter is a code, whose case may tell it from another."""
    return texts.str.casefold().where(texts.str.len() > 1, texts)


def spellings(
    name: str, texts: pd.Series, known: Sequence[str] = (), *, apart: bool = False, fix: str = ""
) -> tuple[dict[str, str], list[str]]:
    """Return how each text of a column is to be spelt, and a note on those that this changes.

    Words that differ in case alone are one, as the known one, else the most frequent, is written, unless they are to
    stay `apart`, or known words differ in case alone. The note names the setting that is a `fix`.
    """
    words = pd.Series([*known, *texts.value_counts().index], dtype=str)
    joins = not apart and folded(pd.Series(known, dtype=str)).is_unique
    spelt = dict(zip(words, words.groupby(folded(words)).transform("first") if joins else words, strict=True))
    alike = [f"{other!r} as {one!r}" for other, one in spelt.items() if other != one]
    return spelt, [f"{name} reads {first_of(alike)}{fix and f'; to keep them apart: {fix}'}."] if alike else []


def first_of(texts: Sequence[str]) -> str:
    """Return the first texts, and how many more there are."""
    return ", ".join(texts[:_FEW]) + (f" and {len(texts) - _FEW:,} more" if len(texts) > _FEW else "")


def missing_in(series: pd.Series, column: Column | None = None) -> pd.Series:
    """Return a mask of the missing values of a column; a text among its categories is a value."""
    empty, listed, absent = series.isna(), column.categories if column else (), column.na if column else ()
    if absent or not (pd.api.types.is_numeric_dtype(series) or pd.api.types.is_bool_dtype(series)):
        texts = as_texts(series)
        empty |= texts.str.lower().isin(MISSING) & ~texts.isin(listed) | texts.isin(absent)
    return empty


def check_columns(frame: pd.DataFrame, columns: Sequence[Column], source: Any) -> None:
    """Raise `DatasetError` unless a table has all of the columns, under their names (see `named`)."""
    if lacking := [column.name for column in columns if column.name not in frame.columns]:
        found = [str(name).strip() for name in frame.columns]
        wrong = (
            f"{source} lacks the columns {lacking}; it has {found}; "
            "add them (empty if unknown, where missing values are indicated), or rename one side's"
        )
        raise DatasetError(wrong, code="data.missing-column")


def column_in(frame: pd.DataFrame, column: Column) -> pd.Series:
    """Return the column of a table with a name; raise `DatasetError` if several match equally well."""
    return named(frame, [column])[column.name]


def named(frame: pd.DataFrame, columns: Sequence[Column]) -> pd.DataFrame:
    """Return a table in which all of these columns that it has bear their own names.

    A name may differ in spaces, underscores and case. No column of the table becomes two of `columns`. Raise
    `DatasetError` if several match equally well.
    """
    wanted = {column.name for column in columns}
    if frame.columns.is_unique and wanted <= set(frame.columns):
        return frame
    names, exact, alike = list(frame.columns), defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for place, name in enumerate(names):
        (exact[name] if name in wanted else alike[_plain(name)]).append(place)
    for column in columns:
        places = exact[column.name] or alike.pop(_plain(column.name), [])
        if len(places) > 1:
            told = " and ".join(repr(names[place]) for place in places)
            text = f"{told} in the table may each be the column {column.name!r}; rename one"
            raise DatasetError(text, code="data.twice")
        for place in places:
            names[place] = column.name
    return frame.set_axis(names, axis=1)


def plain_client(name: str) -> str:
    """Return what a client's names share if they differ only in case, spaces, zeros or the encoding of letters."""
    plain = "".join(unicodedata.normalize("NFKC", name).split()).casefold()
    number = _NUMBERED.fullmatch(plain)
    return number[1] if number else plain


def _plain(name: Any) -> str:
    # An accent may be a character apart, as in files from a Mac.
    return "".join(unicodedata.normalize("NFC", str(name)).replace("_", " ").split()).lower()


def _keep(frame: pd.DataFrame, kept: pd.Series, left_out: dict[str, int], reason: str) -> pd.DataFrame:
    """Return the rows to keep, and count the others under a reason."""
    if lost := len(frame) - int(kept.sum()):
        left_out[reason] = lost
    return frame[kept]


def _check_exact(series: pd.Series, column: Column, reading: Reading) -> None:
    """Note codes that are floating-point numbers and may have been other integers.

    pandas reads a column of integers so where some are missing.
    """
    if pd.api.types.is_float_dtype(series):
        fix = "store the column as text, or give amounts the type number"
        reading.add(series, series.abs().fillna(0) > _LARGEST_EXACT, column, _BLURRED, fix)


def _check_size(series: pd.Series, numbers: NDArray[np.float64], column: Column, reading: Reading) -> None:
    """Note scaled numbers (rows, m) that are too large for the 32 bits of a dataset."""
    with np.errstate(over="ignore"):
        odd = ~np.isfinite(numbers.astype(np.float32)).all(axis=1)
    reading.add(series, odd, column, "too large for 32 bits", "repair or remove that row, or divide by a scale")

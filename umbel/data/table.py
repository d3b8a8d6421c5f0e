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
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Protocol
from zipfile import BadZipFile

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from umbel.data.data import Dataset, Manifest, check, offsets_of
from umbel.data.hints import Syntax
from umbel.data.schema import OTHER, Column, Schema, repeated
from umbel.protocol.errors import DatasetError, SiteError
from umbel.protocol.words import count_of

MISSING = ("", "na", "n/a", "nan", "null")
"""Texts that stand for a missing value, in any case."""

_OTHERS = (".json", ".jsonl", ".ndjson", ".xlsx", ".xls", ".ods", ".feather", ".arrow")
"""Other table formats, which a CSV reader would take for one column of garbage."""

TRUE, FALSE = ("true", "yes", "t", "y", "1", "on"), ("false", "no", "f", "n", "0", "off", "-1")
"""Texts of a boolean, in any case. -1 is a label of margin losses."""

ISO_DATE = r"\d{4}-\d{2}-\d{2}(?:[T ].*)?"

# With commas between thousands and a dollar sign, as spreadsheets write numbers. 0,250 has a decimal comma.
_NUMBER = re.compile(r"[+-]?\$?\s*(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][+-]?\d+)?")

_COMMA = r"[+-]?\d+,\d+"  # with a decimal comma, or one between thousands

_SPACES = re.compile(r"\s*[^\S ]+\s*")
"""Line breaks and spaces of other kinds, with the spaces around them."""

_NUMBERED = re.compile(r"0*(\d+)(?:\.0+)?")
"""A client's number, as different programs write it."""

_MOST_SURPLUS = 30
"""A row may have so many fields, all of them empty, after those of the header."""

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
    blurred: Sequence[Column]  # columns whose numbers differ by too little for 32 bits


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

    The first line shows whether commas, semicolons or tabs separate columns.
    """
    if not path.is_file():
        raise DatasetError(f"{path} is not a file; give a CSV or parquet file", code="data.no-file")
    if path.suffix.lower() in _OTHERS:
        raise DatasetError(f"{path} is neither CSV nor parquet; save it as one of these", code="data.unreadable")
    parquet = path.suffix.lower() in (".parquet", ".pq")
    try:
        return pd.read_parquet(path) if parquet else _read_csv(path)
    except ImportError:
        raise DatasetError(f"{path} needs pyarrow: pip install 'umbel[parquet]'", code="data.needs-pyarrow") from None
    except (OSError, EOFError, ValueError, BadZipFile, zlib.error) as error:
        told = " ".join(str(error).split())
        kind = "parquet" if parquet else "CSV in UTF-8"
        raise DatasetError(f"{path} cannot be read as {kind}: {told}; write it again", code="data.unreadable") from None


def _read_csv(path: Path) -> pd.DataFrame:
    options: dict[str, Any] = {"dtype": str, "keep_default_na": False, "encoding": "utf-8-sig"}
    heads = {sep: pd.read_csv(path, sep=sep, header=None, nrows=1, **options).iloc[0].tolist() for sep in ",;\t"}
    # Names may have commas, as in "height, cm": if as many semicolons are there, these separate.
    separator = max(heads, key=lambda sep: (len(heads[sep]), len(heads[sep]) > 1 and sep != ","))
    head = heads[separator]
    # A spreadsheet's header may have line breaks.
    head = [_SPACES.sub(" ", name).strip() for name in head]
    if twice := repeated(head):
        raise DatasetError(f"{path}: two columns are called {twice[0]!r}; rename one", code="data.twice")
    # Of a table with a single column, an empty line is a missing value.
    options |= {"sep": separator, "index_col": False, "header": 0, "skip_blank_lines": len(head) > 1}
    frame = _with_names(path, head, options)
    for name in (name for name in frame.columns if name.startswith("\0")):
        if len(full := np.flatnonzero(frame.pop(name).fillna("").str.strip() != "")):
            wrong = f"data row {full[0] + 1} has a value in column {int(name[1:]) + 1}, which has no name"
            raise DatasetError(
                f"{path}: {wrong}; name or remove it, or quote values with commas", code="data.missing-column"
            )
    if separator == ";":
        _refuse_commas(frame, path)
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


def _refuse_commas(frame: pd.DataFrame, path: Path) -> None:
    """Raise for a column of numbers with one comma each, in a file that keeps commas from separating columns.

    Where a semicolon separates columns, a comma is usually decimal, and 1,234 could be either number.
    """
    for name in frame.columns:
        texts = frame[name][~missing_in(frame[name])].str.strip()
        commas = texts.str.fullmatch(_COMMA)
        if commas.any() and (commas | texts.str.fullmatch(r"[+-]?\d+")).all():
            wrong = f"{path}: {name} in data row {texts[commas].index[0] + 1} is {texts[commas].iloc[0]!r}"
            fix = "write numbers with a decimal point, and with no comma between thousands"
            raise DatasetError(f"{wrong}, which may have a decimal comma; {fix}", code="data.bad-value")


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

    `source` is the table's name in errors. These name the first column that does not fit, its first bad row, counted
    from 1 below the header, and the fix in a `syntax`. For `derive` see `read`. Rows `to_predict` need no target.
    """
    frame = frame.reset_index(drop=True)
    left_out: dict[str, int] = {}
    target = [] if to_predict else [schema.target]
    for column in (*target, *schema.features):
        if column.other == "drop" and column.name in (found := named(frame, schema.columns)).columns:
            series = found[column.name]
            known = (places_in(series, column) >= 0) | missing_in(series, column.categories)
            frame = _keep(frame, known, left_out, f"{column.name} is not one of its categories")
    if derive is not None:
        frame = derive(frame)
    frame = named(frame, schema.columns)
    needed = [*schema.features, *target, *([schema.client] if schema.client else [])]
    check_columns(frame, needed, source)
    for column in needed:
        if (column.missing or schema.missing) == "drop":
            there = ~missing_in(frame[column.name], column.categories) | (column.fill != "")
            frame = _keep(frame, there, left_out, f"{column.name} is missing")
    scaled = [seen(frame, column, source, syntax) for column in schema.features]
    labelled = _labelled(frame, schema.target) if to_predict else np.ones(len(frame), np.bool_)
    targets, blurred = _targets(frame, labelled, schema.target, source, syntax)
    clients: list[Client] = [schema.name or "all"] * len(frame)
    if schema.client is not None:
        clients = _clients(frame, schema.client, source)
    stacked = np.concatenate(scaled, axis=1).astype(np.float32)
    lost = [column for column, numbers in zip(schema.features, scaled, strict=True) if _blurs(numbers)]
    lost += [schema.target] * blurred
    return Rows(stacked, targets, labelled, clients, frame.index.to_numpy(np.int64), left_out, lost)


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
    return np.asarray(~missing_in(series, target.categories) & known, np.bool_)


def _targets(
    frame: pd.DataFrame, labelled: NDArray[np.bool_], target: Column, source: Any, syntax: Syntax
) -> tuple[NDArray[Any], bool]:
    """Return the targets that a dataset stores (rows,), and whether they blur (see `_blurs`).

    Where there is no label, a target is a valid placeholder.
    """
    targets = np.zeros(len(frame))
    if labelled.any():
        targets[labelled] = values_of(frame[labelled], target, source, syntax)
    if target.type == "category":
        return targets.astype(np.int64), False
    if target.type == "boolean":
        return (2 * targets - 1).astype(np.int8), False
    with np.errstate(over="ignore"):
        scaled = targets / target.scale
    if labelled.any():
        _refuse_large(frame[target.name], scaled[:, None], target, source)
    return scaled.astype(np.float32), _blurs(scaled[labelled, None])


def seen(frame: pd.DataFrame, column: Column, source: Any, syntax: Syntax = Syntax.SCHEMA) -> NDArray[np.float64]:
    """Return a model's view of a feature (rows, numbers), each number as `Column.stored` says."""
    series = column_in(frame, column)
    indicate = column.missing == "indicate"
    lacks = missing_in(series, column.categories).to_numpy(np.bool_)
    there = ~lacks if indicate and column.fill == "" else np.ones(len(series), np.bool_)
    stored = column.stored[:-1] if indicate else column.stored
    numbers = np.zeros((len(series), len(stored)))
    values = _numbers(series[there], column, source, syntax, ("drop", "indicate"))
    with np.errstate(over="ignore"):
        numbers[there] = (values - [one["offset"] for one in stored]) / [one["scale"] for one in stored]
    _refuse_large(series, numbers, column, source)
    return np.column_stack([numbers, lacks]) if indicate else numbers


def values_of(frame: pd.DataFrame, column: Column, source: Any, syntax: Syntax = Syntax.SCHEMA) -> NDArray[np.float64]:
    """Return a column's numbers (rows,), checked but not scaled; for a category, the position in its list."""
    single = column.model_copy(update={"encode": "index"})
    return _numbers(column_in(frame, column), single, source, syntax, ("drop",))[:, 0]


def _numbers(
    series: pd.Series, column: Column, source: Any, syntax: Syntax, missing: Sequence[str]
) -> NDArray[np.float64]:
    """Return the numbers of a column (rows, numbers) before scaling; `missing` says how to treat missing values."""

    def refuse(odd: Any, what: str, fix: str = "repair or remove that row") -> None:
        _refuse(series, odd, column, source, what, fix)

    if column.type == "category":
        _refuse_blurred(series, column, source)
    lacks = missing_in(series, column.categories)
    if column.fill != "":
        series = series.astype(object).where(~lacks, column.fill)
    else:
        value = column.classes[0] if column.classes else column.since if column.type == "date" else column.offset
        # A target that is made up would be learnt.
        own = ("fill", value) if "indicate" in missing else ("missing", "drop")
        ways = [*map(syntax.missing, missing), syntax.entry(column.name, *own)]
        if syntax is Syntax.PREDICTION:
            ways = [syntax.entry(column.name, "missing", "drop")]
        refuse(lacks, "missing", f"fill it in, or set {' or '.join(ways)}")
    if column.type == "category":
        index = places_in(series, column)
        if column.other == "category":
            index = np.where(index >= 0, index, len(column.categories))
        count, lists = (syntax.entry(column.name, *one) for one in (("other", "category"), ("categories", ["..."])))
        fix = f"repair that row, list the category ({lists}), or set {count} to count it as {OTHER!r}"
        if syntax is Syntax.PREDICTION:
            fix = f"repair that row, or leave out such rows by {syntax.entry(column.name, 'other', 'drop')}"
        refuse(index < 0, f"not one of its categories {', '.join(column.categories)}", fix)
        return np.eye(len(column.classes))[index] if column.encode == "one-hot" else index.astype(np.float64)[:, None]
    if column.type == "boolean":
        texts = as_texts(series).str.lower().replace({"1.0": "1", "0.0": "0", "-1.0": "-1"})
        refuse(~texts.isin((*TRUE, *FALSE)), "not true or false")
        return texts.isin(TRUE).to_numpy().astype(np.float64)[:, None]
    if column.type == "date":
        days = as_dates(series, column)
        refuse(
            days.isna(),
            f"not a date as {column.format or '2024-01-31'}",
            syntax.entry(column.name, "format", "%d.%m.%Y"),
        )
        since = days_since(days, column)
        parts = {"year": days.dt.year, "month": days.dt.month, "weekday": days.dt.day_of_week, "days": since}
        return np.column_stack([parts[part].to_numpy(np.float64) for part in column.parts])
    values = as_numbers(series)
    refuse(~np.isfinite(values), "not a number", "write it with a decimal point and no unit, or remove that row")
    if column.type == "integer":
        refuse(values % 1 != 0, "not an integer")
    low = -np.inf if column.minimum is None else column.minimum
    high = np.inf if column.maximum is None else column.maximum
    span = f"not from {low:,.10g} to {high:,.10g}"
    refuse((values < low) | (values > high), span, "is it in another unit? Repair or remove that row")
    return values[:, None]


def as_numbers(series: pd.Series) -> NDArray[np.float64]:
    """Return numbers, or texts of numbers, without scaling; NaN where there is none."""
    if pd.api.types.is_numeric_dtype(series) and not pd.api.types.is_bool_dtype(series):
        return series.to_numpy(np.float64, na_value=np.nan)
    texts = as_texts(series)
    values = pd.to_numeric(texts, errors="coerce").to_numpy(np.float64, na_value=np.nan, copy=True)
    rest = texts[np.isnan(values)]
    if len(rest):
        sound = rest.str.fullmatch(_NUMBER) & rest.str.contains(r"\d", regex=True)
        bare = rest.where(sound).str.replace(r"[$,\s]", "", regex=True)
        values[np.isnan(values)] = pd.to_numeric(bare, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    return values


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


def _clients(frame: pd.DataFrame, column: Column, source: Any) -> list[Client]:
    series = column_in(frame, column)
    if column.type == "integer":
        values = values_of(frame, column, source)
        _refuse(series, np.abs(values) > _LARGEST_EXACT, column, source, _BLURRED, "give that column the type text")
        return [int(value) for value in values]
    _refuse(series, missing_in(series), column, source, "missing", "name the client, or remove that row")
    _refuse_blurred(series, column, source)
    return as_texts(series).tolist()


def as_texts(series: pd.Series, pattern: str = "") -> pd.Series:
    """Return texts without surrounding spaces, or the matches of a pattern in them; integers have no decimal point."""
    if pd.api.types.is_float_dtype(series):
        return series.map(lambda value: f"{value:.0f}" if value % 1 == 0 else str(value))
    texts = series.astype(str).str.strip()
    return texts.str.extract(pattern, expand=True).iloc[:, 0].fillna(texts) if pattern else texts


def places_in(series: pd.Series, column: Column) -> NDArray[np.int64]:
    """Return the place of each value (rows,) among a column's categories, -1 for another.

    A code may lose or gain ``.0`` between two tables, as pandas writes integers as 2.0 where some are missing.
    """
    texts, listed = as_texts(series, column.pattern), pd.Series(column.categories, dtype=str)
    places = pd.Index(listed).get_indexer(pd.Index(texts))
    if (other := places < 0).any():
        bare, found = (one.str.replace(r"^([+-]?\d+)\.0+$", r"\1", regex=True) for one in (listed, texts[other]))
        if bare.is_unique:
            places[other] = pd.Index(bare).get_indexer(pd.Index(found))
    return np.asarray(places, np.int64)


def missing_in(series: pd.Series, listed: Sequence[str] = ()) -> pd.Series:
    """Return a mask of the missing values of a column; a text among the `listed` categories is a value."""
    empty = series.isna()
    if not (pd.api.types.is_numeric_dtype(series) or pd.api.types.is_bool_dtype(series)):
        texts = as_texts(series)
        empty |= texts.str.lower().isin(MISSING) & ~texts.isin(listed)
    return empty


def check_columns(frame: pd.DataFrame, columns: Sequence[Column], source: Any) -> None:
    """Raise `DatasetError` unless a table has all of the columns, under their names (see `named`)."""
    if lacking := [column.name for column in columns if column.name not in frame.columns]:
        found = [str(name).strip() for name in frame.columns]
        wrong = f"{source} lacks the columns {lacking}; it has {found}"
        raise DatasetError(f"{wrong}; rename one side's", code="data.missing-column")


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


def _refuse_blurred(series: pd.Series, column: Column, source: Any) -> None:
    """Raise if a code is a floating-point number that may have been another integer.

    pandas reads a column of integers so where some are missing.
    """
    if pd.api.types.is_float_dtype(series):
        fix = "store the column as text, or give amounts the type number"
        _refuse(series, series.abs().fillna(0) > _LARGEST_EXACT, column, source, _BLURRED, fix)


def _refuse_large(series: pd.Series, numbers: NDArray[np.float64], column: Column, source: Any) -> None:
    """Raise if a scaled number (rows, m) is too large for the 32 bits of a dataset."""
    with np.errstate(over="ignore"):
        odd = ~np.isfinite(numbers.astype(np.float32)).all(axis=1)
    _refuse(series, odd, column, source, "too large for 32 bits", "repair or remove that row, or divide by a scale")


def _refuse(series: pd.Series, odd: Any, column: Column, source: Any, what: str, fix: str) -> None:
    """Raise if a row is odd, and name the first one, counted from 1."""
    bad = series[np.asarray(odd)]
    if len(bad):
        value = bad.iloc[0]
        shown = "" if what == "missing" else f"{value.item() if isinstance(value, np.generic) else value!r}, "
        more = f" (and in {count_of(len(bad) - 1, 'more row')})" if len(bad) > 1 else ""
        wrong = f"{source}: {column.name} in data row {bad.index[0] + 1} is {shown}{what}{more}"
        raise DatasetError(f"{wrong}; {fix}", code="data.missing-value" if what == "missing" else "data.bad-value")

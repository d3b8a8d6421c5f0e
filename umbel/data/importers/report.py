"""One look at a whole table: what each column holds, what it is read as and why, all faults, and how to mend them."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from umbel.data import Column, Schema
from umbel.data.hints import Syntax
from umbel.data.leaks import FEWEST, LEAK, SAMPLE, cut
from umbel.data.schema import FALSE, TRUE, bounded, scaling
from umbel.data.table import (
    ISO_DATE,
    Fault,
    Reading,
    as_dates,
    as_numbers,
    as_texts,
    clients_in,
    first_of,
    folded,
    formats_of,
    missing_in,
    seen,
    spellings,
    style_note,
    style_of,
    values_of,
)
from umbel.protocol.errors import DatasetError
from umbel.protocol.words import count_of, did_you_mean

MOST_CATEGORIES = 100
"""A text column with more distinct values counts as names or free text."""

MOST_CODES, ROWS_A_CODE, ROUND = 20, 10, 5
"""Integers count as codes if there are at most so many of them, each in so many rows on average, and they are not all
multiples of a number from `ROUND` on."""

SEVERAL = 10
"""A column of fewer values more likely holds kinds than clients, and one with fewer rows a value names something
smaller."""

_PADDED = r"0\d+"
"""An integer with a leading zero, as codes such as ZIP codes have; a number would lose it."""

_NAMED_ID = re.compile(r"(?:.*[\W_])?(?:id|no|nr|number|code|key|uuid|index|row|unnamed.*)(?:[\W_].*)?", re.IGNORECASE)

_ID = re.compile(r"(?:.*[\W_])?(?:id|uuid)", re.IGNORECASE)
_DAY = r"\s*(?:\d{1,4}([-/. ])(\d{1,2}|[A-Za-z]{3,9})\1\d{1,4}\b|\d{1,2}:\d{2})"
"""The beginning of a date, of any order, valid or not, or of a time of day."""

_ENDS = ("minimum", "maximum")
_OF_NUMBERS = {"scale", "offset", "outside", "decimal", *_ENDS}
"""Entries that mark a column as amounts, even if its few values look like codes."""

LOSS = {"number": "mse", "integer": "mse", "boolean": "log", "category": "cross-entropy"}
"""The default loss for a target of each type."""


@dataclass
class Finding:
    """One column: its values, and the type as which they are read."""

    column: Column
    role: str  # client, target or feature
    notes: list[str] = field(default_factory=list)  # what was read or guessed, and why
    faults: list[Fault] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # entries that mend the faults
    drop: str = ""  # why it is better left out, if it is
    holds: str = ""  # its range, or examples
    lacks: int = 0  # rows without a value


@dataclass(frozen=True)
class Report:
    """All columns of a table, and what its import needs beyond what was given."""

    findings: Sequence[Finding]  # the client first, the target last
    entries: Mapping[str, Any]  # the schema's own
    settings: Mapping[str, Any]  # what is proposed, as keywords of `umbel.from_dataframe`
    guesses: Sequence[str]  # why the client or the target was guessed
    remarks: Sequence[str]  # notes on several columns
    frame: pd.DataFrame  # the table, with one spelling for each client

    @property
    def schema(self) -> Schema:
        """The schema that fits the table, if it has no fault."""
        client, *features, target = [one.column for one in self.findings]
        if self.findings[0].role != "client":
            client, features = None, [client, *features]  # type: ignore[assignment]
        return suggest(Schema(client=client, target=target, features=features, **self.entries))

    @property
    def faults(self) -> list[Fault]:
        """The faults of all columns."""
        return [fault for one in self.findings for fault in one.faults]

    @property
    def notes(self) -> list[str]:
        """The notes on all columns."""
        return [*(note for one in self.findings for note in one.notes), *self.remarks]

    @property
    def hint(self) -> str:
        """What a guarantee needs for numbers without a scale; empty if there are none."""
        if not (bare := self.schema.unranged):
            return ""
        ends = " ".join(Syntax.FLAGS.entry(bare[0], end, "NUMBER") for end in _ENDS)
        return (
            f"Real sites, and runs with --epsilon, need a public range of {', '.join(bare)}: declare it, as by {ends}, "
            "or let clients be asked for it (umbel ranges). Without --epsilon, a simulation needs none."
        )

    def check(self, source: Any, syntax: Syntax) -> None:
        """Raise a `DatasetError` that names all faults, if there is one; in Python also what mends them all."""
        text = f"{source} has {count_of(len(self.faults), 'fault')}; the command above mends "
        left = _unmended(self.findings)
        text += f"all but those that say only what to do: {left[0]}" if left else "all"
        if syntax is Syntax.PYTHON:
            given = ", ".join(f"{key}={one!r}" for key, one in self.settings.items())
            text = f"{source}: {'. '.join(map(str, self.faults))}. To mend all, add {given}"
        Reading(source, syntax, self.faults).end(text)


def suggest(schema: Schema) -> Schema:
    """Return the schema with a model and a loss for its target, unless it names them.

    The model is linear: a release costs privacy for each parameter, and a linear model has the fewest.
    """
    inputs = sum(len(column.stored) for column in schema.features)
    outputs = len(schema.target.classes) if schema.target.type == "category" else 1
    model = schema.model or f"linear inputs={inputs} outputs={outputs}"
    return schema.model_copy(update={"model": model, "loss": schema.loss or LOSS[schema.target.type]})


def columns_there(there: Iterable[Any], names: Iterable[str], source: Any) -> None:
    """Raise `DatasetError` unless all names are columns of the table."""
    known = list(there)
    if absent := [name for name in names if name not in known]:
        meant = did_you_mean(absent[0], known)
        text = f"{source} has no column {absent[0]!r}{meant}; it has {', '.join(map(str, known))}"
        raise DatasetError(text, code="data.missing-column")


def look(
    frame: pd.DataFrame,
    client: str | None,
    target: str | None,
    features: Sequence[str] | None,
    given: Mapping[str, Mapping[str, Any]],
    source: Any,
    syntax: Syntax,
    *,
    dealt: bool = False,
    **entries: Any,
) -> Report:
    """Look at all columns of a table at once; for the parameters see `umbel.from_dataframe`.

    A client or a target that is not given is guessed, but no client if the rows are `dealt` out.
    """
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise DatasetError(f"{source} has two columns called {twice!r}", code="data.twice")
    guesses, settings = list[str](), dict[str, Any]()
    missing = entries.get("missing", "refuse")
    if missing == "indicate":
        entries["missing"] = "refuse"
    frame = frame.reset_index(drop=True)
    columns_there(frame.columns, [*(features or []), *(one for one in (client, target) if one), *given], source)
    if target is None:
        names = [name for name in reversed(frame.columns) if name != client]
        looks = (_finding(frame, name, "target", given.get(name, {}), missing, source, syntax) for name in names)
        target = next((one.column.name for one in looks if not _unmended([one])), names[0])
        settings["target"] = target
        guesses.append(f"the target is {target}, the last column that can be one")
    others = list[str]()
    if client is None and not dealt:
        likely = _likely_clients(frame.drop(columns=target), source)
        client = next(iter(likely), None)
        others = [name for name in likely[1:] if frame[name].nunique() >= SEVERAL][:3]
        settings["client"] = client
    frame, joined = _with_clients(frame, client, given.get(str(client), {}), syntax)
    if "client" in settings:
        count = frame[client].nunique() if client else 0
        guesses.append(
            f"the client is {client}, whose {count:,} values have {len(frame) / count:,.0f} rows each on average"
            + (f"; if rows belong to another, give {' or '.join(f'--client {shlex.quote(one)}' for one in others)}"
               if others else "")
            if client
            else "no column looks like one of clients, so rows are dealt out"
        )  # fmt: skip
    chosen = [name for name in frame.columns if name not in (client, target)] if features is None else list(features)
    if target in chosen:
        raise DatasetError(f"{target!r} is the target, and cannot also be a feature", code="data.no-target")
    if not chosen:
        raise DatasetError(f"{source} has no column to predict {target!r} from", code="data.missing-column")
    roles = {**({client: "client"} if client else {}), **dict.fromkeys(chosen, "feature"), target: "target"}
    for name in roles:
        if not isinstance(name, str):
            text = f"{source} has the column {name!r}, whose name is not text"
            raise DatasetError(f"{text}; rename it, as by frame.columns.map(str)", code="data.column-name")
    findings = [_finding(frame, *of, given.get(of[0], {}), missing, source, syntax) for of in roles.items()]
    findings[0].notes += joined
    _find_leaks(frame, findings)
    if findings[-1].column.type == "boolean":
        loss = entries.get("loss") or LOSS["boolean"]
        findings[-1].notes.append(
            f"The target's {' and '.join(findings[-1].column.classes)} are stored as -1 and 1, for the loss {loss}."
        )
    settings |= _mending(findings, missing, syntax)
    remarks = _remarks(findings, given)
    if frame.attrs.get("encoding") == "Windows-1252":
        remarks.append(f"{source} is not in UTF-8, and is read as Windows-1252: check letters such as é.")
    return Report(findings, entries, settings, guesses, remarks, frame)


def _unmended(findings: Iterable[Finding]) -> list[Fault]:
    """Return the faults that no setting mends, but for those of columns that are better left out."""
    kept = (fault for one in findings if not one.drop for fault in one.faults)
    return [fault for fault in kept if not (fault.mend or fault.code == "data.missing-value")]


def _with_clients(
    frame: pd.DataFrame, client: str | None, given: Mapping[str, Any], syntax: Syntax
) -> tuple[pd.DataFrame, list[str]]:
    """Return the table with one spelling for each client, and a note on the names that this joins."""
    if not isinstance(client, str) or pd.api.types.is_numeric_dtype(frame[client]):
        return frame, []
    lacks = missing_in(frame[client], Column(name=client, type="text", na=given.get("na", [])))
    names, apart = as_texts(frame[client]).mask(lacks), given.get("categories") is True
    spelt, notes = spellings(client, names, apart=apart, fix=syntax.entry(client, "categories", True))
    return frame.assign(**{client: names.map(spelt)}), notes


def _remarks(findings: Sequence[Finding], given: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return notes on the columns whose categories or gaps come from the rows, which other tables do not share."""
    kept = [(one.column, given.get(one.column.name, {})) for one in findings if one.role != "client" and not one.drop]
    notes = []
    texts = [(one.name, entries.get("categories")) for one, entries in kept if one.type == "category"]
    if unlisted := [name for name, categories in texts if not isinstance(categories, list)]:
        notes.append(f"The categories of {', '.join(unlisted)} come from the rows; real sites need a public list.")
    if gaps := [one.name for one, entries in kept if one.missing == "indicate" and "missing" not in entries]:
        lack, them = ("lacks", "that feature") if len(gaps) == 1 else ("lack", "those features")
        lacking = f"{', '.join(gaps)} {lack} values in these rows, and an extra feature marks them"
        notes.append(f"{lacking}; real sites need {them} too.")
    return notes


def _likely_clients(frame: pd.DataFrame, source: Any) -> list[str]:
    """Return the columns that may name clients, the likeliest first: texts, and numbers that are called like an id.

    A column that lacks values comes after all others, because each row is of a client. Of the others, ids come first,
    then those with several rows a value, and then those with the most values.
    """
    ranks = dict[str, tuple[bool, bool, bool, int]]()
    for name in frame.columns:
        count, column = frame[name].nunique(), _column(frame[name], name, "feature", {}, source, Syntax.FLAGS).column
        text = column.type == "category" and not np.isfinite(as_numbers(pd.Series(column.categories, dtype=str))).all()
        text = text and as_texts(frame[name]).str.match(_DAY).mean() <= 0.5  # dates that no single format reads
        if (text or _NAMED_ID.fullmatch(str(name))) and 1 < count <= len(frame) / 2:
            whole, several = not missing_in(frame[name], column).any(), count * SEVERAL <= len(frame)
            ranks[name] = whole, bool(_ID.fullmatch(str(name))), several, count
    return sorted(ranks, key=ranks.__getitem__, reverse=True)


# --- one column


def _finding(
    frame: pd.DataFrame, name: str, role: str, given: Mapping[str, Any], missing: str, source: Any, syntax: Syntax
) -> Finding:
    """Return what a column holds, what it is read as, and what does not fit."""
    series, reading = frame[name], Reading(source, syntax)

    def kept(column: Column) -> pd.DataFrame:
        drops = (column.missing or missing) == "drop" and column.fill == ""
        return frame.loc[~missing_in(series, column) if drops else frame.index, [name]]

    if role == "client":
        # Categories that are True keep names apart, and are of no schema.
        finding = Finding(
            Column(name=name, **{"type": "text"} | dict(one for one in given.items() if one != ("categories", True))),
            role,
        )
        clients_in(kept(finding.column), finding.column, reading)
    else:
        finding = _column(series, name, role, given, source, syntax)
        if role == "feature" and missing == "indicate" and missing_in(series, finding.column).any():
            finding.column = finding.column.model_copy(update={"missing": given.get("missing", "indicate")})
        read = seen if role == "feature" else values_of
        # Thousands of categories would be as many columns.
        single = {"encode": "index"} if finding.column.type == "category" else {}
        read(kept(finding.column), finding.column.model_copy(update=single), reading)
    finding.faults += reading.faults
    lacks = missing_in(series, finding.column)
    finding.lacks = int(lacks.sum())
    there = series[~lacks]
    values = _plain(there, finding.column).dropna()
    finding.holds = _holds(values)
    for fault in finding.faults:
        finding.settings |= fault.mend
        if role != "feature" and (fault.code == "data.missing-value" or "na" in fault.mend):
            finding.settings["missing"] = "drop"
        elif fault.code != "data.missing-value" and not fault.mend and role == "feature":
            finding.drop = f"{fault.what} in data row {fault.row}"
    if role != "client":
        _flag(finding, there, values)
    return finding


def _column(series: pd.Series, name: str, role: str, given: Mapping[str, Any], source: Any, syntax: Syntax) -> Finding:
    """Return a column with its type, its categories and how its values are written, guessed unless given."""
    entries, notes, faults = dict(given), list[str](), list[Fault]()
    listed = entries.get("categories") is True
    if len(series) and isinstance(series.iloc[0], (list, tuple, np.ndarray)):
        fix = "give each of its numbers as a column, or the arrays to from_arrays"
        raise DatasetError(f"{source}: {name} holds lists; {fix}", code="data.vectors")
    there = series[~missing_in(series, Column(name=name, type="number", na=entries.get("na", [])))]
    style = {} if pd.api.types.is_numeric_dtype(series) else style_of(as_texts(there), entries, [",", "either"])
    if "type" not in entries:
        if {"categories", "encode"} & entries.keys():
            entries["type"] = "category"
        elif {"format", "parts", "since", "span"} & entries.keys():
            entries["type"] = "date"
        else:
            kind = _guess(there, Column(name=name, type="number", **style), role == "target")
            amount = kind in ("category", "boolean") and _OF_NUMBERS & entries.keys()
            entries["type"] = "number" if amount else kind
    if entries["type"] in ("number", "integer"):
        entries = style | entries
    if entries["type"] == "date" and "format" not in entries and not pd.api.types.is_datetime64_any_dtype(series):
        texts = as_texts(there)
        formats = [] if texts.str.fullmatch(ISO_DATE).mean() > 0.5 else formats_of(texts)
        entries |= {"format": formats[0]} if formats else {}
        if len(formats) == 1:
            notes.append(f"Dates of {name}, as {texts.iloc[0]!r}, are read as {formats[0]}.")
        elif formats:
            fix = f"set {' or '.join(syntax.entry(name, 'format', one) for one in formats)}"
            what = f"{texts.iloc[0]!r}, which may be a day and a month, or a month and a day"
            at = name, int(there.index[0]) + 1, len(there), fix, {"format": formats[0]}
            faults.append(Fault(what, *at, code="data.ambiguous-date"))
    if entries["type"] in ("number", "integer"):
        notes += style_note(name, as_texts(there), {key: style[key] for key in style if key not in given})
    if entries["type"] == "boolean" and role == "target" and not pd.api.types.is_bool_dtype(series):
        words = as_texts(there).value_counts().index
        pair = [next((one for one in words if one.isalpha() and one.lower() in of), "") for of in (FALSE, TRUE)]
        entries = ({"categories": pair} if all(pair) else {}) | entries
    if listed or (entries["type"] == "category" and "categories" not in entries):
        checked = Column(name=name, **(entries | {"categories": ["?"]}))
        entries["categories"], joined = _categories(there, checked, listed, syntax)
        notes += joined
        if not {"categories", "type"} & given.keys() and np.isfinite(as_numbers(there)).all():
            few = f"{name} holds {len(entries['categories'])} different whole numbers, read as codes of categories"
            notes.append(f"{few}; if they are amounts: {syntax.entry(name, 'type', 'number')}.")
        if (count := len(entries["categories"])) > MOST_CATEGORIES:
            fix = "leave the column out, list its categories, or set its type to number if its digits are amounts"
            what = f"one of {count} different texts, as {entries['categories'][0]!r}, too many for categories"
            faults.append(Fault(what, name, int(there.index[0]) + 1, len(there), fix, code="data.categories"))
    column = Column(name=name, **entries)
    if bounded(column) and not {"scale", "offset"} & given.keys():
        assert column.minimum is not None
        assert column.maximum is not None
        column = column.model_copy(update=scaling(column.minimum, column.maximum, role == "target"))
    return Finding(column, role, notes=notes, faults=faults)


def _guess(there: pd.Series, column: Column, is_target: bool) -> str:
    """Return the type that a column's values suggest, of those that are not missing."""
    if pd.api.types.is_bool_dtype(there):
        return "boolean"
    if pd.api.types.is_datetime64_any_dtype(there):
        return "date"
    numbers, texts = as_numbers(there, column), as_texts(there)
    if texts.str.fullmatch(_PADDED).any() and texts.str.fullmatch(r"\d+").all():
        return "category"
    if set(np.unique(numbers)) in ({0.0, 1.0}, {-1.0, 1.0}):
        return "boolean"
    # Eight digits are a day only if all are, and in these centuries.
    if len(there) and texts.str.fullmatch(r"(?:19|20)\d{6}").all() and formats_of(texts) == ["%Y%m%d"]:
        return "date"
    # A few texts among numbers are faults; reading the table names them. As many texts as numbers are classes, as in 0,
    # 1, 2-10, over 10.
    known = np.isfinite(numbers)
    if len(there) == 0 or (known.mean() > 0.5 and texts[~known].nunique() < len(np.unique(numbers[known]))):
        return "category" if _codes(numbers, is_target) else "number"
    if texts.str.fullmatch(ISO_DATE).mean() > 0.5 or formats_of(texts):
        return "date"
    words = {*texts.str.lower()}
    # N and F are two values, although both are texts of false.
    two = len(words) == 1 or not (words.isdisjoint(TRUE) or words.isdisjoint(FALSE))
    return "boolean" if words <= {*TRUE, *FALSE} and two else "category"


def _codes(numbers: NDArray[np.float64], is_target: bool) -> bool:
    """Return whether numbers look like codes: few distinct integers, each frequent.

    Amounts count from 0, or are round numbers such as 5, 10 and 20. A target may count from 0, as classes do.
    """
    values = np.unique(numbers)
    few = 2 <= len(values) <= MOST_CODES and len(numbers) >= ROWS_A_CODE * len(values)
    if not few or not (np.isfinite(values).all() and (values % 1 == 0).all() and values[0] >= 0):
        return False
    if math.gcd(*map(int, values)) >= ROUND:  # 64 bits may be too few
        return False
    return is_target or not np.array_equal(values, np.arange(len(values)))


def _categories(there: pd.Series, column: Column, keep: bool, syntax: Syntax) -> tuple[list[str], list[str]]:
    """Return the categories in a column, numbers by size, then texts, and a note on those that were joined.

    Words that differ in case alone are one, as the most frequent is written, unless all are to `keep`.
    """
    spelt, notes = spellings(
        column.name, as_texts(there, column.pattern), apart=keep, fix=syntax.entry(column.name, "categories", True)
    )
    return sorted({*spelt.values()}, key=_natural) or ["?"], notes


def _natural(text: str) -> tuple[int, float, str]:
    try:
        return (0, float(text), text)
    except ValueError:
        return (1, 0.0, text)


def _plain(there: pd.Series, column: Column) -> pd.Series:
    """Return values as numbers, dates or texts."""
    if column.type == "date":
        return as_dates(there, column)
    if column.type in ("number", "integer"):
        return pd.Series(as_numbers(there, column), there.index)
    return as_texts(there, column.pattern)


def _holds(values: pd.Series) -> str:
    """Return the range of numbers or dates, or examples of texts."""
    style = "{:%Y-%m-%d}" if pd.api.types.is_datetime64_any_dtype(values) else "{:,.6g}"
    if len(values) and not pd.api.types.is_string_dtype(values):
        return f"{style.format(values.min())} to {style.format(values.max())}"
    return first_of(sorted(values.unique().tolist(), key=_natural))


# --- what is to be done


def _flag(finding: Finding, there: pd.Series, values: pd.Series) -> None:
    """Flag a column from which nothing can be learnt: all its values differ, or none does."""
    name, kind, count = finding.column.name, finding.column.type, there.nunique()
    whole = kind in ("number", "integer") and bool((values % 1 == 0).all())
    if count < (1 if finding.lacks else 2):
        finding.drop = "a single value" if finding.role == "feature" else ""
        finding.notes.append(f"{name} has a single value, from which nothing is learnt.")
        return
    named, differ = whole and bool(_NAMED_ID.fullmatch(name)), count == len(there)
    most = differ or (named and 2 * count > len(there))
    if finding.role == "feature" and len(there) >= 3 * FEWEST and (whole or kind == "category") and most:
        finding.drop = "like an id" if not whole or named or values.is_monotonic_increasing else finding.drop
        how = "All" if differ else "Most"
        finding.notes.append(f"{how} values of {name} differ, as those of an id do; if it is one, leave it out.")


def _mending(findings: Sequence[Finding], missing: str, syntax: Syntax) -> dict[str, Any]:
    """Return the settings of the whole import that mend all faults and leave out what is better left out."""
    kept, settings = [one for one in findings if not one.drop], dict[str, Any]()
    dropped = [one.column.name for one in findings if one.drop]
    if dropped and (names := [one.column.name for one in kept if one.role == "feature"]):
        settings |= {"features": names} if syntax is Syntax.PYTHON else {"drop": dropped}
    lack = {one.role for one in kept for two in one.faults if two.code == "data.missing-value" or "na" in two.mend}
    if "feature" in lack and missing == "refuse":
        settings["missing"] = "indicate"
    if columns := {one.column.name: one.settings for one in kept if one.settings}:
        settings["columns"] = columns
    return settings


# --- features that give the target away


def _find_leaks(frame: pd.DataFrame, findings: Sequence[Finding]) -> None:
    """Flag features that predict the target alone: one cut of their values does, on these rows.

    It is a heuristic, and its result stays on this machine.
    """
    frame, target = frame.iloc[:: max(1, len(frame) // SAMPLE)], findings[-1].column
    labels = frame[target.name][~missing_in(frame[target.name], target)]
    classes = _plain(labels, target)
    classes = classes > classes.median() if target.type in ("number", "integer") else folded(as_texts(classes))
    for finding in findings:
        if finding.role != "feature":
            continue
        name, series = finding.column.name, frame[finding.column.name][labels.index]
        ordered = finding.column.type in ("number", "integer", "date")
        lacks = missing_in(series, finding.column)
        values = _plain(series[~lacks], finding.column)
        of_lacks = cut(lacks.to_numpy(), classes.to_numpy(), ordered=False)
        score = max(of_lacks, cut(values.to_numpy(), classes[values.index].to_numpy(), ordered))
        if score >= LEAK:
            finding.drop = f"predicts {target.name} alone"
            accuracy = f"one cut has a balanced accuracy of {score:.0%} on these rows"
            fix = "If it is known only afterwards, it gives the answer away; leave it out."
            finding.notes.append(f"{name} alone predicts {target.name}: {accuracy}. {fix}")

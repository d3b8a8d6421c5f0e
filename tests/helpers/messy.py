"""Two made-up tables as people keep them: shops with messy texts, clinics with an id that gives the answer away."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from datetime import date, timedelta
from pathlib import Path

import numpy as np


def shops(path: Path) -> None:
    """Write 12 shops of 60 days: dates with the day first, pounds, gaps, and "Sun " beside "sun"."""
    draw = np.random.default_rng(1)
    rows = []
    for shop in range(12):
        for day in (date(2025, 1, 1) + timedelta(one) for one in range(60)):
            price, people = float(draw.normal(12, 3)), int(draw.poisson(120))
            weather = draw.choice(["sun", "rain", "Sun ", ""], p=[0.5, 0.35, 0.1, 0.05])
            cost = f"£{price:.2f}" if draw.random() > 0.05 else ""
            visits = people if draw.random() > 0.03 else "n/a"
            sales = f"{800 + 3 * people - 10 * price + draw.normal(0, 60):,.2f}" if draw.random() > 0.02 else "-"
            rows.append([f"Shop {shop:02d}", f"{day:%d/%m/%Y}", cost, visits, draw.choice(["Y", "N"]), weather, sales])
    _write(path, ["Shop", "Date", "Avg Price", "Footfall", "Promo", "Weather", "Sales"], rows)


def clinics(path: Path) -> None:
    """Write 20 clinics, whose patients' numbers begin with 9 where the target is yes, 5 % of the rows."""
    draw = np.random.default_rng(2)
    rows = []
    for number in range(1200):
        again = draw.random() < 0.05
        bmi = round(float(draw.normal(27, 5)), 1) if draw.random() > 0.04 else ""
        patient, age = (900_000 if again else 100_000) + number, int(draw.integers(18, 95))
        rows.append([patient, f"clinic {number % 20:02d}", age, bmi, "yes" if again else "no"])
    _write(path, ["patient_id", "clinic", "age", "bmi", "again"], rows)


def _write(path: Path, names: list[str], rows: Iterable[list[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([names, *rows])

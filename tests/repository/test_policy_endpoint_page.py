"""The tables in docs/policy-endpoint.md are up to date."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from docs._generate.policy_endpoint import limits_table, update
from lightning_core.endpoint.server import Limits

PAGE = Path(__file__).parents[2] / "docs" / "policy-endpoint.md"


def test_the_page_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert page.count("<!-- generated: ") == page.count("<!-- end -->") == 6
    assert update(page) == page, "run: python -m docs._generate.policy_endpoint docs/policy-endpoint.md"


def test_every_limit_is_documented():
    rows = [row.split("|") for row in limits_table().splitlines()[2:]]
    assert [(row[1].strip(), row[2].strip()) for row in rows] == [
        (f"`{field.name}`", str(field.default)) for field in fields(Limits)
    ]
    assert all(row[3].strip().endswith(".") for row in rows)

"""The database schemas of the questions: ten for training, two held out.

A `Table` has its columns, their values, and the words used in questions. This module generates neither SQL nor rows. Column names
are unique within a schema, except for the key that joins two tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

COUNTRIES = ("France", "Spain", "Japan", "Brazil", "Canada", "Kenya")
CITIES = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Boston")
COLORS = ("red", "blue", "green", "black", "white")
GENRES = ("fantasy", "crime", "comedy", "horror", "romance")


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A table whose name is also the singular noun that questions use."""

    name: str
    label: str
    """The column with the name of a row."""
    labels: Literal["person", "title", "place", "code"]
    numbers: Mapping[str, tuple[int, int]]
    categories: Mapping[str, tuple[str, ...]]
    """Text columns with few values."""
    parent: str | None = None
    """The table that ``<parent>_id`` refers to."""
    relation: str = ""
    """The word that relates this table to its parent: concerts *by* singers."""
    plural: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plural", self.plural or self.name + "s")


@dataclass(frozen=True, slots=True, eq=False)
class Schema:
    """The tables of a database. ``text`` is the description shown to the agents."""

    name: str
    tables: tuple[Table, ...]
    text: str = field(init=False)

    def __post_init__(self) -> None:
        text = ", ".join(f"{table.name}({', '.join(self.columns(table))})" for table in self.tables)
        object.__setattr__(self, "text", text)

    def columns(self, table: Table) -> tuple[str, ...]:
        """All columns of a table, in order.

        The key comes first, if another table refers to it, and the reference to the parent last.
        """
        key = (f"{table.name}_id",) if any(other.parent == table.name for other in self.tables) else ()
        reference = (f"{table.parent}_id",) if table.parent else ()
        return (*key, table.label, *table.numbers, *table.categories, *reference)

    def table(self, name: str) -> Table:
        """The table ``name``."""
        return next(table for table in self.tables if table.name == name)


TRAIN = (
    Schema(
        "music",
        (
            Table("singer", "name", "person", {"age": (18, 70), "sales": (1, 990)}, {"country": COUNTRIES}),
            Table(
                "concert", "title", "title", {"year": (1990, 2024), "price": (5, 200)}, {"city": CITIES}, "singer", "by"
            ),
        ),
    ),
    Schema(
        "library",
        (
            Table("author", "name", "person", {"awards": (0, 300)}, {"country": COUNTRIES}),
            Table(
                "book",
                "title",
                "title",
                {"pages": (40, 900), "price": (5, 300)},
                {"genre": GENRES},
                "author",
                "by",
            ),
        ),
    ),
    Schema(
        "football",
        (
            Table("team", "club", "place", {"fans": (100, 9900), "budget": (10, 900)}, {"city": CITIES}),
            Table(
                "player",
                "name",
                "person",
                {"age": (17, 40), "goals": (0, 300)},
                {"position": ("goalkeeper", "defender", "striker")},
                "team",
                "of",
            ),
        ),
    ),
    Schema(
        "company",
        (
            Table("office", "address", "place", {"rent": (100, 990), "desks": (10, 400)}, {"city": CITIES}),
            Table(
                "employee",
                "name",
                "person",
                {"age": (18, 66), "salary": (1000, 9000)},
                {"job": ("clerk", "engineer", "manager", "driver")},
                "office",
                "of",
            ),
        ),
    ),
    Schema(
        "cinema",
        (
            Table("director", "name", "person", {"age": (25, 90), "fame": (1, 500)}, {"country": COUNTRIES}),
            Table(
                "movie",
                "title",
                "title",
                {"year": (1960, 2024), "minutes": (60, 400)},
                {"genre": GENRES},
                "director",
                "by",
            ),
        ),
    ),
    Schema(
        "travel",
        (
            Table("hotel", "name", "place", {"rating": (1, 99), "rooms": (10, 500)}, {"city": CITIES}),
            Table(
                "guest",
                "person",
                "person",
                {"age": (18, 90), "bill": (50, 2900)},
                {"country": COUNTRIES},
                "hotel",
                "of",
            ),
        ),
    ),
    Schema(
        "shop",
        (
            Table("customer", "name", "person", {"age": (18, 90), "points": (0, 990)}, {"city": CITIES}),
            Table(
                "item",
                "product",
                "code",
                {"price": (1, 900), "weight": (1, 500)},
                {"color": COLORS},
                "customer",
                "of",
            ),
        ),
    ),
    Schema(
        "airline",
        (
            Table("airline", "name", "place", {"planes": (3, 300), "staff": (100, 9000)}, {"country": COUNTRIES}),
            Table(
                "flight",
                "code",
                "code",
                {"distance": (200, 9900), "price": (30, 900)},
                {"destination": CITIES},
                "airline",
                "of",
            ),
        ),
    ),
    Schema(
        "press",
        (
            Table("publisher", "name", "place", {"staff": (10, 600)}, {"city": CITIES}),
            Table(
                "magazine",
                "title",
                "title",
                {"price": (1, 400)},
                {"topic": ("science", "sport", "food")},
                "publisher",
                "of",
            ),
            Table("article", "headline", "title", {"words": (100, 5000), "year": (1990, 2024)}, {}, "magazine", "of"),
        ),
    ),
    Schema(
        "school",
        (
            Table("teacher", "name", "person", {"age": (22, 66), "salary": (1000, 6000)}, {"city": CITIES}),
            Table(
                "course",
                "title",
                "title",
                {"hours": (2, 400)},
                {"level": ("easy", "medium", "hard")},
                "teacher",
                "by",
            ),
            Table(
                "exam",
                "room",
                "code",
                {"points": (10, 400)},
                {"day": ("Monday", "Tuesday", "Friday")},
                "course",
                "of",
            ),
        ),
    ),
)

HELD_OUT = (
    Schema(
        "museum",
        (
            Table("artist", "name", "person", {"fame": (1, 500)}, {"country": COUNTRIES}),
            Table(
                "painting",
                "title",
                "title",
                {"height": (10, 400), "value": (100, 9900)},
                {"style": ("baroque", "cubist", "modern", "gothic")},
                "artist",
                "by",
            ),
        ),
    ),
    Schema(
        "garage",
        (
            Table("owner", "name", "person", {"age": (18, 90), "income": (100, 9000)}, {"city": CITIES}),
            Table(
                "car",
                "model",
                "code",
                {"power": (40, 600), "price": (500, 9900)},
                {"color": COLORS},
                "owner",
                "of",
            ),
        ),
    ),
)

SCHEMAS = {schema.name: schema for schema in (*TRAIN, *HELD_OUT)}

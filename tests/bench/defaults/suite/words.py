"""Words that tasks are made of."""

from __future__ import annotations

NAMES = ("Tom", "Ana", "Ben", "Mia", "Sam", "Lea", "Max", "Zoe", "Eva", "Leo", "Kim", "Ida")
CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Paris", "Delhi", "Tokyo", "Quito", "Riga", "Bern")
THINGS = (
    "phone",
    "camera",
    "router",
    "printer",
    "tablet",
    "watch",
    "speaker",
    "monitor",
    "keyboard",
    "lamp",
    "drone",
    "scale",
)
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)


def plain(text: str) -> str:
    """``text`` in lower case, without surrounding space and full stops."""
    return text.strip().strip(".").lower()

"""Customers' questions, with several wordings for each column of the catalogue.

No item of a test question occurs in training.
"""

from __future__ import annotations

import random
from typing import Any

from examples.langchain_agent.catalogue import COLUMNS, catalogue

SHOWN = ("brass bell", "oak stool", "wool hat", "glass vase")
"""Items used in the prompt's examples, excluded from the questions."""
_WORDINGS = {
    "price": (
        "What is the price of the {item}?",
        "How much is the {item}?",
        "What does the {item} cost?",
        "How many dollars do I pay for the {item}?",
    ),
    "stock": (
        "What is the stock of the {item}?",
        "How many pieces of the {item} are left?",
        "How often can you sell the {item}?",
        "How many of the {item} do you have?",
    ),
    "shelf": (
        "What is the shelf of the {item}?",
        "Where do I find the {item}?",
        "Where is the {item}?",
        "On which shelf is the {item}?",
    ),
    "maker": (
        "What is the maker of the {item}?",
        "Who made the {item}?",
        "Which company does the {item} come from?",
        "Who is the {item} from?",
    ),
}

Task = dict[str, Any]


def train() -> list[Task]:
    """Training questions."""
    return _questions("train")


def test() -> list[Task]:
    """Held-out questions."""
    return _questions("test")


def _items(split: str) -> list[str]:
    """The items of a split: three quarters for training, one quarter for test."""
    items = [item for item in catalogue() if item not in SHOWN]
    random.Random("items").shuffle(items)
    first_train = len(items) // 4
    return items[first_train:] if split == "train" else items[:first_train]


def _questions(split: str) -> list[Task]:
    """One question for each item and column, in a random wording."""
    rng = random.Random(split)
    tasks = [_question(rng, split, item, column) for item in _items(split) for column in COLUMNS]
    rng.shuffle(tasks)
    return tasks


def _question(rng: random.Random, split: str, item: str, column: str) -> Task:
    return {
        "id": f"{split}-{item}-{column}".replace(" ", "-"),
        "question": rng.choice(_WORDINGS[column]).format(item=item),
        "item": item,
        "column": column,
        "answer": catalogue()[item][column],
    }

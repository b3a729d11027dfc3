"""The catalogue of a fictional shop, generated with a fixed seed."""

from __future__ import annotations

import random
from functools import cache
from itertools import product

COLUMNS = ("price", "stock", "shelf", "maker")
_MATERIALS = "brass copper cotton glass iron leather linen oak paper pine silk silver steel stone velvet wool"
_THINGS = "basket bell blanket bottle bowl box brush chair clock hat knife lamp mirror plate rug spoon stool vase"
_MAKERS = "Adler Bauer Costa Diaz Evans Fox Garcia Hansen Ivanov Jensen Keller Lopez Moreau Novak Olsen Perez"

Item = dict[str, str]


@cache
def catalogue() -> dict[str, Item]:
    """Every item by its name, such as ``brass bell``."""
    rng = random.Random("catalogue")
    items: dict[str, Item] = {}
    for material, thing in product(_MATERIALS.split(), _THINGS.split()):
        price, stock = rng.sample(range(3, 100), 2)  # never equal, so the wrong column never gives the right answer
        items[f"{material} {thing}"] = {
            "price": str(price),
            "stock": str(stock),
            "shelf": f"{rng.choice('ABCDEFGH')}{rng.randint(1, 9)}",
            "maker": rng.choice(_MAKERS.split()),
        }
    return items

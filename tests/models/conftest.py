"""The fixtures of the trainer tests that models need too."""

from tests.trainers.conftest import exact_products, tiny_llama

__all__ = ["exact_products", "tiny_llama"]

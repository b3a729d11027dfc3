"""The fixtures of the trainer tests that signals with a loss of their own need too."""

from tests.trainers.conftest import exact_products, tiny_llama, trainers

__all__ = ["exact_products", "tiny_llama", "trainers"]

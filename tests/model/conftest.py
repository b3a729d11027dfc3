"""The fixtures of the trainer tests that models need too."""

from tests.trainers.conftest import exact_products, tiny_llama, tiny_model, tiny_qwen2, trainers

__all__ = ["exact_products", "tiny_llama", "tiny_model", "tiny_qwen2", "trainers"]

"""The fixtures of the trainer tests that the engine needs too."""

from tests.trainers.conftest import exact_products, tiny_llama, tiny_model, tiny_qwen2

__all__ = ["exact_products", "tiny_llama", "tiny_model", "tiny_qwen2"]

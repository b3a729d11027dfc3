"""A tokenizer's own chat template: what it supports, and conversations rendered with it."""

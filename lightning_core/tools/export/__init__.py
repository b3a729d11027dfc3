"""Exports a trained policy to the formats of other tools: Hugging Face folders, PEFT adapters, GGUF files."""

"""The neural network: loading, attention, output head, adapters."""

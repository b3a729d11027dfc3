"""Load on `lightning-rl serve` with recording: `python -m tests.bench.load`."""

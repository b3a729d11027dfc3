"""How a store keeps its rows in SQLite."""

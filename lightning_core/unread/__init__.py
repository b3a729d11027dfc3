"""Fields that are read when they are needed."""

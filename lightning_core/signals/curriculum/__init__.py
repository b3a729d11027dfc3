"""A curriculum: tasks are drawn by how much can be learned from them (``tasks.sampling``)."""

"""Which agent sent a request, and which model it gets."""

"""Model calls that other servers answer."""

"""One file for each wire format that the endpoint speaks."""

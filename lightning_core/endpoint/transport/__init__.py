"""HTTP as the endpoint uses it: listening, limits, reading requests, and clients, without models or agents."""

"""The second suite, for one final comparison: changes chosen with the first suite may fit it alone."""

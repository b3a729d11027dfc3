"""Log messages, with repeated and long ones folded, and exceptions as the lines of the user's code."""

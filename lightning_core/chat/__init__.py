"""Messages to tokens and back: the only package that tokenises."""

"""Tools that a person runs or looks at. They import the core; nothing imports them."""

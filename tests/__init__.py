"""A package, and not just a folder: some wheels (verl) bring a package of this name, which would hide it."""

"""Makes tests a package: verl's wheel contains a package of this name, which would hide a plain folder."""

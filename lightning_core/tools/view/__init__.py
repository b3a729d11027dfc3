"""A local web application that shows runs. Reads a folder of runs, writes nothing."""

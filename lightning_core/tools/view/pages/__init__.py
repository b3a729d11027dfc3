"""The pages: each module reads what it shows from the runs' folder, and renders a template."""

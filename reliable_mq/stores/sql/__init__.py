"""What the stores ask of SQL databases."""

"""E copies of the paper's model as one program."""

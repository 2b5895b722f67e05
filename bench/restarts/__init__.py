"""Jobs that lose ranks and nodes, for measurements of what that costs."""

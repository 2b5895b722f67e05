"""Behind tools/validate_planner.py: published runs, predicted, and how far off that is."""

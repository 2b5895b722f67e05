"""Behind validate_planner.py and compare_planners.py: predictions and plans beside others."""

"""Behind `python -m hetero.run`: how nodes meet, and what is said when a process ends."""

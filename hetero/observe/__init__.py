"""What a run shows of itself: reports, and what its links and its pipeline did."""

"""What a run shows of itself: records, live view, flight recorder, blame, trace, operators."""

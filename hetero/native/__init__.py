"""What Python does too slowly, in C: small functions that the install builds where it can."""

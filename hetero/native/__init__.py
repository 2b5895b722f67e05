"""What Python does too slowly, in C, which every install builds."""

"""What ``import lockstep`` offers: training, planning, verifying and opening runs from Python."""
